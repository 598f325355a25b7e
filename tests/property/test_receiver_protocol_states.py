"""The receiver's state machine and its coverage, fed with right and wrong events in any order."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import BlockId, LogicalBlock, ceil_div
from kv_transfer.handoff import FirstToken, Grant, GrantedBlock, Verdict
from kv_transfer.protocol import (
    Answered,
    Begin,
    BlockLanded,
    Confirm,
    Fail,
    Fenced,
    Fetch,
    Granted,
    IllegalEventError,
    Opened,
    Publish,
    ReceiverProtocol,
    Recycle,
    TransferState,
)
from kv_transfer.transport import CorruptTransferError

BLOCK_SIZE = 4


def block(logical: int, valid_tokens: int, generation: int = 0) -> GrantedBlock:
    return GrantedBlock(
        logical=LogicalBlock(logical),
        block_id=BlockId(100 + logical),
        generation=generation,
        valid_tokens=valid_tokens,
    )


def tokens_in(logical: int, num_tokens: int) -> int:
    return max(0, min(BLOCK_SIZE, num_tokens - logical * BLOCK_SIZE))


COVERAGE_CASES = {
    "num_tokens": st.integers(1, 24),
    "marks": st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 5)), max_size=30),
}


@settings(max_examples=150, deadline=None)
@given(**COVERAGE_CASES)
def test_coverage_is_full_exactly_when_each_expected_block_came_with_its_tokens(num_tokens, marks):
    coverage = Coverage(num_tokens=num_tokens, block_size=BLOCK_SIZE)
    seen: set[int] = set()
    for logical, valid_tokens in marks:
        good = (
            0 <= logical < ceil_div(num_tokens, BLOCK_SIZE)
            and valid_tokens == tokens_in(logical, num_tokens)
            and logical not in seen
        )
        try:
            coverage.mark(block(logical, valid_tokens))
            assert good
            seen.add(logical)
        except CorruptTransferError:
            assert not good
        coverage.check_invariants()
        tokens = sum(tokens_in(i, num_tokens) for i in seen)
        assert coverage.is_full == (tokens == num_tokens)


class ProtocolMachine(RuleBasedStateMachine):
    """Keeps its own account of what was granted and landed, and what that permits."""

    @initialize(
        num_tokens=st.integers(1, 14),
        spare=st.integers(0, 2),
        skip=st.integers(0, 2),
        is_open=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_tokens, spare, skip, is_open):
        self.num_tokens = num_tokens
        self.end = ceil_div(num_tokens, BLOCK_SIZE)
        self.skip = min(skip, self.end - 1)
        self.expected = self.end - self.skip
        self.protocol = ReceiverProtocol(
            num_tokens=num_tokens,
            block_size=BLOCK_SIZE,
            placement=[BlockId(i) for i in range(self.skip, self.end + spare)],
            first_blocks=(self.skip,),
        )
        self.granted: set[int] = set()
        self.landed: set[int] = set()
        self.numbers = 0
        self.has_last = False
        self.was_valid = False
        self.fenced = False
        self.confirms = 0
        if is_open:
            self.begin_and_open()

    def send(self, event):
        """Apply an event; (accepted, action). A refused one leaves everything as it was."""
        before = self.protocol.state, self.protocol.blocks_landed, self.protocol.first
        try:
            action = self.protocol.apply(event)
        except (IllegalEventError, CorruptTransferError):
            after = self.protocol.state, self.protocol.blocks_landed, self.protocol.first
            assert after == before
            return False, None
        self.confirms += isinstance(action, Confirm)
        return True, action

    @rule()
    def begin_and_open_again(self):
        self.begin_and_open()

    def begin_and_open(self):
        self.send(Begin())
        self.send(Opened())

    @rule(
        start=st.integers(0, 3),
        count=st.integers(0, 4),
        number_error=st.sampled_from([0, 0, 0, 0, 0, -1, 1]),
        tokens_error=st.sampled_from([0, 0, 0, 0, 0, -1, 1]),
        is_last=st.booleans(),
    )
    def grant(self, start, count, number_error, tokens_error, is_last):
        logicals = list(range(start, start + count))
        blocks = [block(i, tokens_in(i, self.num_tokens)) for i in logicals]
        if blocks:
            blocks[-1] = dataclasses.replace(
                blocks[-1], valid_tokens=blocks[-1].valid_tokens + tokens_error
            )
        was_active = self.protocol.state is TransferState.ACTIVE
        accepted, action = self.send(
            Granted(
                Grant(
                    sequence_number=self.numbers + number_error,
                    blocks=tuple(blocks),
                    first=FirstToken(token_id=1) if is_last else None,
                )
            )
        )
        good = (
            was_active
            and not self.has_last
            and number_error == 0
            and (tokens_error == 0 or not blocks)
            and all(self.skip <= i < self.end and i not in self.granted for i in logicals)
            and (not is_last or len(self.granted) + len(blocks) == self.expected)
        )
        assert accepted == good
        if accepted:
            self.numbers += 1
            self.granted |= set(logicals)
            self.has_last = is_last
            if blocks:
                assert action == Fetch(
                    tuple(blocks), {LogicalBlock(i): BlockId(i) for i in logicals}
                )

    @rule(count=st.integers(1, 4), ends=st.booleans())
    def grant_what_is_next(self, count, ends):
        """As an owner does: of wrong grants alone, few transfers would come to a last one."""
        if self.protocol.state is not TransferState.ACTIVE or self.has_last:
            return
        left = [i for i in range(self.skip, self.end) if i not in self.granted]
        logicals = left[:count]
        is_last = ends and logicals == left
        accepted, _ = self.send(
            Granted(
                Grant(
                    sequence_number=self.numbers,
                    blocks=tuple(block(i, tokens_in(i, self.num_tokens)) for i in logicals),
                    first=FirstToken(token_id=1) if is_last else None,
                )
            )
        )
        assert accepted
        self.numbers += 1
        self.granted |= set(logicals)
        self.has_last = is_last

    @rule(data=st.data(), generation=st.sampled_from([0, 0, 0, 1]))
    def land(self, data, generation):
        logical = data.draw(st.integers(0, self.end))
        was_active = self.protocol.state is TransferState.ACTIVE
        accepted, _ = self.send(
            BlockLanded(block(logical, tokens_in(logical, self.num_tokens), generation))
        )
        good = (
            was_active
            and generation == 0
            and logical in self.granted
            and logical not in self.landed
        )
        assert accepted == good
        if accepted:
            self.landed.add(logical)

    @precondition(lambda self: self.granted - self.landed)
    @rule(data=st.data())
    def land_what_was_there_before(self, data):
        """A block that was granted, as it was under an earlier holder."""
        logical = data.draw(st.sampled_from(sorted(self.granted - self.landed)))
        accepted, _ = self.send(BlockLanded(block(logical, tokens_in(logical, self.num_tokens), 1)))
        assert not accepted

    @rule()
    def land_all_granted(self):
        if self.protocol.state is TransferState.ACTIVE:
            for logical in sorted(self.granted - self.landed):
                accepted, _ = self.send(
                    BlockLanded(block(logical, tokens_in(logical, self.num_tokens)))
                )
                assert accepted
                self.landed.add(logical)

    @rule(verdict=st.sampled_from([Verdict.VALID, Verdict.VALID, Verdict.INVALID]))
    def answer(self, verdict):
        accepted, _ = self.send(Answered(verdict))
        if accepted:
            self.was_valid = verdict is Verdict.VALID

    @rule()
    def publish(self):
        accepted, _ = self.send(Publish())
        if accepted:
            assert self.was_valid
            assert len(self.landed) == self.expected
            assert self.has_last

    @rule(happens=st.sampled_from([False, False, False, False, True]))
    def fail(self, happens):
        if happens:  # most transfers get further than to their first failure
            self.send(Fail())

    @rule()
    def fence(self):
        accepted, _ = self.send(Fenced())
        self.fenced = self.fenced or accepted

    @rule()
    def recycle(self):
        accepted, _ = self.send(Recycle())
        if accepted:
            assert self.fenced

    @invariant()
    def holds(self):
        self.protocol.check_invariants()
        assert self.protocol.blocks_landed == len(self.landed)
        assert self.confirms <= 1
        if self.protocol.state is TransferState.PUBLISHED:
            assert self.was_valid


ProtocolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestProtocol = ProtocolMachine.TestCase
