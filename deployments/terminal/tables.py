"""Columns of text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_columns"]

_GAP = "  "


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its widest cell; rows are equally long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
