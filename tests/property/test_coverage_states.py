"""Coverage of several groups of layers, each from a block of its own on, in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import BlockId, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.transport import CorruptTransferError

BLOCK_SIZE = 4


class CoverageMachine(RuleBasedStateMachine):
    """Keeps, for each group, the set of tokens that are still to come, and nothing of blocks."""

    @initialize(num_tokens=st.integers(1, 24), data=st.data())
    def start(self, num_tokens, data):
        # A prefix hit begins all groups later, a window only its own; the last block always lands.
        last = (num_tokens - 1) // BLOCK_SIZE
        firsts = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=3))
        self.num_tokens = num_tokens
        self.coverage = Coverage(
            num_tokens=num_tokens, block_size=BLOCK_SIZE, first_blocks=tuple(firsts)
        )
        self.missing = [set(range(first * BLOCK_SIZE, num_tokens)) for first in firsts]
        self.landed = 0

    def tokens_of(self, group, index):
        """Tokens of a block that are still to come."""
        if not 0 <= group < len(self.missing):
            return set()
        return self.missing[group] & set(range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE))

    def mark(self, group, index, valid_tokens):
        """Whether the block was taken."""
        block = GrantedBlock(
            logical=logical_block(group, index),
            block_id=BlockId(7),
            generation=0,
            valid_tokens=valid_tokens,
        )
        try:
            self.coverage.mark(block)
        except CorruptTransferError:
            return False
        self.landed += 1
        return True

    @rule(
        group=st.integers(-1, 3), index=st.integers(0, 6), tokens_error=st.sampled_from([0, -1, 1])
    )
    def land_any(self, group, index, tokens_error):
        tokens = self.tokens_of(group, index)
        taken = self.mark(group, index, len(tokens) + tokens_error)
        assert taken == (bool(tokens) and tokens_error == 0)
        if taken:
            self.missing[group] -= tokens

    @precondition(lambda self: any(self.missing))
    @rule(data=st.data())
    def land_one_that_is_missing(self, data):
        groups = [group for group, missing in enumerate(self.missing) if missing]
        group = data.draw(st.sampled_from(groups))
        index = data.draw(st.sampled_from(sorted(self.missing[group]))) // BLOCK_SIZE
        tokens = self.tokens_of(group, index)
        assert self.mark(group, index, len(tokens))
        self.missing[group] -= tokens

    @rule(group=st.integers(0, 2), index=st.integers(0, 5))
    def land_what_is_not_missing(self, group, index):
        whole = min(BLOCK_SIZE, self.num_tokens - index * BLOCK_SIZE)
        if whole > 0 and not self.tokens_of(group, index):
            assert not self.mark(group, index, whole)

    @invariant()
    def holds(self):
        self.coverage.check_invariants()
        assert self.coverage.blocks_landed == self.landed
        assert self.coverage.is_full == (not any(self.missing))


CoverageMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCoverage = CoverageMachine.TestCase
