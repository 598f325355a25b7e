"""Attention over paged keys and values: one interface, one file per kind of hardware."""
