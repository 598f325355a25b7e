"""Settings: schema, presets, loading. The bottom layer."""
