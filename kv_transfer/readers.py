"""Whose reads of the same blocks must all have ended before the blocks may be freed.

Each rank of a tensor-parallel decode worker pulls its heads of a sequence for itself, under a lease
of its own. What one of them says of its lease, that it is confirmed, released or has expired, must
not free what another one still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.handoff import ReleaseReason, TransferKey

__all__ = ["Ended", "Readers"]

Ended = tuple[TransferKey, ReleaseReason]
"""A transfer whose lease has ended, and why."""


@dataclass(slots=True)
class _Group:
    reading: set[TransferKey]
    ended: list[Ended] = field(default_factory=list)


class Readers:
    """Transfers that read the same blocks, in groups; most groups are of one."""

    def __init__(self) -> None:
        """Nobody reads."""
        self._group_of: dict[TransferKey, _Group] = {}

    def begin(self, keys: Sequence[TransferKey]) -> None:
        """These read the same blocks. ValueError if one reads already, or is named twice."""
        if len(set(keys)) < len(keys) or self._group_of.keys() & set(keys):
            raise ValueError("a transfer reads twice")
        group = _Group(reading=set(keys))
        self._group_of |= dict.fromkeys(keys, group)

    def end(self, key: TransferKey, reason: ReleaseReason) -> tuple[Ended, ...]:
        """A lease has ended: what may be freed now, which is nothing while others of it read.

        KeyError for one that does not read.
        """
        group = self._group_of.pop(key)
        group.reading.remove(key)
        group.ended.append((key, reason))
        return () if group.reading else tuple(group.ended)

    def check_invariants(self) -> None:
        """Assert that whoever reads is in a group that knows of it."""
        for key, group in self._group_of.items():
            assert key in group.reading, "a transfer reads and its group does not know"
