"""A sequence that several owners send, each a part of the heads: what its blocks may be used for.

Each source has a `ReceiverProtocol` of its own, and all of them write to the same blocks. So what a
single one answers for its bytes, this answers for the blocks: decode may use them when every source
is CONFIRMED, and the pool gets them back when no source writes any more. That one source has failed
says neither of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kv_transfer.protocol import (
    Fail,
    Fenced,
    IllegalEventError,
    Publish,
    ReceiverProtocol,
    Recycle,
    TransferState,
)

__all__ = ["JoinedTransfer"]

_IDLE: Final = frozenset({TransferState.RESERVED, TransferState.CONFIRMED})
"""Nothing was asked for, or everything has come: once no pull runs, nothing can land."""


class JoinedTransfer:
    """The sources of one sequence, published together and given back together."""

    def __init__(self, sources: Sequence[ReceiverProtocol]) -> None:
        """Of sources that have not begun; ValueError if there is none."""
        if not sources:
            raise ValueError("a transfer needs a source")
        self._sources = tuple(sources)

    @property
    def is_quiesced(self) -> bool:
        """Whether no byte of any source lands any more."""
        quiesced = (TransferState.PUBLISHED, TransferState.QUIESCED, TransferState.FREE)
        return all(source.state in quiesced for source in self._sources)

    @property
    def blocks_landed(self) -> int:
        """Blocks whose bytes are in place, of all sources: of their sizes."""
        return sum(source.blocks_landed for source in self._sources)

    def publish(self) -> None:
        """Hand the blocks to decode: INV-COVER, every source is confirmed.

        Raises `IllegalEventError` and changes nothing if one is not.
        """
        for source in self._sources:
            if not source.allows(Publish):
                raise IllegalEventError(f"Publish while {source.state.value}")
        for source in self._sources:
            source.apply(Publish())

    def withdraw(self) -> None:
        """Nothing is pulled any more, nor published: give up what has not failed; safe to repeat.

        A source that has failed has given itself up, or its fence is broken and it never will.
        """
        for source in self._sources:
            if source.state in _IDLE:
                source.apply(Fail())
                source.apply(Fenced())

    def recycle(self) -> None:
        """The pool gets the blocks back, if every source has failed and is quiet: INV-FENCE.

        Nothing happens before, and nothing the second time.
        """
        if all(source.state is TransferState.QUIESCED for source in self._sources):
            for source in self._sources:
                source.apply(Recycle())

    def check_invariants(self) -> None:
        """Assert that the sources' blocks are published, and given back, by all or by none."""
        for source in self._sources:
            source.check_invariants()
        for shared in (TransferState.PUBLISHED, TransferState.FREE):
            states = {source.state is shared for source in self._sources}
            assert len(states) == 1, f"INV-COVER, INV-FENCE: {shared.value} by some of the sources"
