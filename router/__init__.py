"""Which model pool serves an agent step. Pure."""
