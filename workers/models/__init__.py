"""Where models come from: sources, cache, conversion, loading."""
