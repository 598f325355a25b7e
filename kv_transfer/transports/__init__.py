"""One file per way to move bytes."""
