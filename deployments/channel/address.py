"""Where a decode worker's end of the channel is found; goes through Serve."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ChannelAddress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """One decode worker that takes channels."""

    worker: str
    """Its name: that of its replica, which no other one ever has."""
    host: str
    port: int
