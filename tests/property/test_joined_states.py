"""One sequence from several sources, fed in any order: published whole or not, freed when quiet."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.geometry import BlockId, ceil_div, logical_block
from kv_transfer.handoff import FirstToken, Grant, GrantedBlock, Verdict
from kv_transfer.joined import JoinedTransfer
from kv_transfer.protocol import (
    Answered,
    Begin,
    BlockLanded,
    Fail,
    Fenced,
    Granted,
    IllegalEventError,
    Opened,
    ReceiverProtocol,
    TransferState,
)
from kv_transfer.transport import CorruptTransferError

DRAINING, QUIESCED = TransferState.DRAINING, TransferState.QUIESCED
number = st.integers(0, 3)


class SourceModel:
    """What one source has done, told apart from what its protocol says of it."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        self.blocks = [
            GrantedBlock(
                logical=logical_block(0, index),
                block_id=BlockId(index),
                generation=0,
                valid_tokens=min(block_size, num_tokens - index * block_size),
            )
            for index in range(ceil_div(num_tokens, block_size))
        ]
        self.protocol = ReceiverProtocol(
            num_tokens=num_tokens,
            block_size=block_size,
            placement=[block.block_id for block in self.blocks],
        )
        self.granted = 0
        self.landed: set[int] = set()
        self.is_valid = False
        self.writes = False
        """A session is open: bytes can land."""

    @property
    def is_whole(self) -> bool:
        return len(self.landed) == len(self.blocks) and self.is_valid


class JoinedStates(RuleBasedStateMachine):
    """Sources do right and wrong things; the caller tries to publish and to recycle at any time."""

    @initialize(
        num_tokens=st.integers(1, 9), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4)
    )
    def begin_with(self, num_tokens: int, sizes: list[int]) -> None:
        self.sources = [SourceModel(num_tokens, size) for size in sizes]
        self.joined = JoinedTransfer([source.protocol for source in self.sources])
        self.is_published = self.is_over = False

    @property
    def has_failed(self) -> bool:
        return any(source.protocol.state in (DRAINING, QUIESCED) for source in self.sources)

    def source(self, index: int) -> SourceModel:
        return self.sources[index % len(self.sources)]

    @rule(index=number)
    def open_a_session(self, index: int) -> None:
        source = self.source(index)
        if self.is_over or source.protocol.state is not TransferState.RESERVED:
            return
        source.protocol.apply(Begin())
        source.protocol.apply(Opened())
        source.writes = True

    @rule(index=number, size=st.integers(1, 9), repeat=st.booleans())
    def grant(self, index: int, size: int, repeat: bool) -> None:
        source = self.source(index)
        start = max(0, source.granted - 1) if repeat else source.granted
        part = source.blocks[start : start + size]
        is_last = start + size >= len(source.blocks)
        first = FirstToken(token_id=1) if is_last else None
        count = source.protocol._num_grants
        grant = Grant(sequence_number=count, blocks=tuple(part), first=first)
        try:
            source.protocol.apply(Granted(grant))
        except (CorruptTransferError, IllegalEventError):
            return
        source.granted = start + len(part)

    @rule(index=number, block=number)
    def land(self, index: int, block: int) -> None:
        source = self.source(index)
        block %= len(source.blocks)
        try:
            source.protocol.apply(BlockLanded(source.blocks[block]))
        except (CorruptTransferError, IllegalEventError):
            return
        assert source.writes
        assert block not in source.landed
        source.landed.add(block)

    @rule(index=number, verdict=st.sampled_from((None, Verdict.VALID)))
    def bring_what_is_missing(self, index: int, verdict: Verdict | None) -> None:
        """So that many runs come to an end that is worth looking at."""
        source = self.source(index)
        self.open_a_session(index)
        if source.granted < len(source.blocks):
            self.grant(index, len(source.blocks), repeat=False)
        for block in range(source.granted):
            self.land(index, block)
        if verdict is not None:
            self.answer(index, verdict)

    @rule(index=number, verdict=st.sampled_from(Verdict))
    def answer(self, index: int, verdict: Verdict) -> None:
        source = self.source(index)
        try:
            source.protocol.apply(Answered(verdict))
        except IllegalEventError:
            return
        source.is_valid = verdict is Verdict.VALID
        # A session that has confirmed is closed by its own pull before anything else is done.
        source.writes = not source.is_valid

    @rule(index=number)
    def fail(self, index: int) -> None:
        source = self.source(index)
        if source.writes and source.protocol.state is not DRAINING:
            source.protocol.apply(Fail())

    @rule(index=number)
    def fence(self, index: int) -> None:
        source = self.source(index)
        if source.protocol.state is DRAINING:
            source.protocol.apply(Fenced())
            source.writes = False

    @rule()
    def publish(self) -> None:
        try:
            self.joined.publish()
        except IllegalEventError:
            return
        assert not self.is_over
        self.is_published = self.is_over = True

    @rule()
    def withdraw(self) -> None:
        """As the caller does once every pull has ended, and one of them has failed."""
        if not self.has_failed or any(source.writes for source in self.sources):
            return
        self.joined.withdraw()
        self.is_over = True

    @rule()
    def recycle(self) -> None:
        self.joined.recycle()

    @invariant()
    def what_is_published_is_whole_and_confirmed_by_every_source(self) -> None:
        self.joined.check_invariants()
        published = any(s.protocol.state is TransferState.PUBLISHED for s in self.sources)
        assert published == self.is_published
        assert not published or all(source.is_whole for source in self.sources)
        assert self.joined.blocks_landed == sum(len(source.landed) for source in self.sources)

    @invariant()
    def no_block_is_free_while_a_source_can_write_to_it(self) -> None:
        writes = any(source.writes for source in self.sources)
        assert not (self.joined.is_quiesced and writes)
        if any(source.protocol.state is TransferState.FREE for source in self.sources):
            assert not writes
            assert not self.is_published


TestJoinedStates = JoinedStates.TestCase
TestJoinedStates.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def whole(*block_sizes: int) -> tuple[JoinedTransfer, list[SourceModel]]:
    """Sources that have brought everything."""
    sources = [SourceModel(4, size) for size in block_sizes]
    for source in sources:
        for event in (Begin(), Opened()):
            source.protocol.apply(event)
        grant = Grant(sequence_number=0, blocks=tuple(source.blocks), first=FirstToken(token_id=1))
        source.protocol.apply(Granted(grant))
        for block in source.blocks:
            source.protocol.apply(BlockLanded(block))
    return JoinedTransfer([source.protocol for source in sources]), sources


def test_a_sequence_is_published_when_the_last_source_has_confirmed():
    joined, sources = whole(2, 3)
    sources[0].protocol.apply(Answered(Verdict.VALID))
    with pytest.raises(IllegalEventError, match="Publish while landed"):
        joined.publish()
    assert sources[0].protocol.state is TransferState.CONFIRMED

    sources[1].protocol.apply(Answered(Verdict.VALID))
    joined.publish()

    assert joined.is_quiesced
    joined.recycle()
    joined.withdraw()
    assert {source.protocol.state for source in sources} == {TransferState.PUBLISHED}


def test_a_source_that_drains_keeps_the_blocks_of_all():
    """Whatever the others are."""
    joined, sources = whole(2, 3)
    sources[0].protocol.apply(Answered(Verdict.VALID))
    sources[1].protocol.apply(Fail())
    joined.withdraw()
    joined.recycle()
    assert [source.protocol.state for source in sources] == [QUIESCED, DRAINING]
    assert not joined.is_quiesced

    sources[1].protocol.apply(Fenced())
    joined.recycle()

    assert joined.is_quiesced
    assert {source.protocol.state for source in sources} == {TransferState.FREE}


def test_a_sequence_without_a_source_is_refused():
    with pytest.raises(ValueError, match="needs a source"):
        JoinedTransfer([])


def test_check_invariants_sees_blocks_that_one_source_has_freed():
    joined, sources = whole(2, 3)
    for event in (Fail(), Fenced()):
        sources[0].protocol.apply(event)
    sources[0].protocol._state = TransferState.FREE
    with pytest.raises(AssertionError, match="INV-COVER, INV-FENCE: free by some"):
        joined.check_invariants()
