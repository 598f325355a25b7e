"""Any order of calls on a block pool, against a dictionary that says what it should hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=4, max_model_len=4)
        self.taken: dict[BlockId, BlockState] = {}
        self.frees = [0] * NUM_BLOCKS

    def some_of(self, data: st.DataObject, *states: BlockState) -> tuple[BlockId, ...]:
        """A few blocks in the given states, in any order."""
        candidates = [block for block, state in self.taken.items() if state in states]
        if not candidates:
            return ()
        return tuple(data.draw(st.lists(st.sampled_from(candidates), unique=True)))

    def move(self, block_ids: tuple[BlockId, ...], state: BlockState) -> None:
        self.taken.update(dict.fromkeys(block_ids, state))

    @rule(num_blocks=st.integers(1, NUM_BLOCKS + 2))
    def reserve(self, num_blocks: int) -> None:
        free = NUM_BLOCKS - len(self.taken)
        block_ids = self.pool.reserve(num_blocks)
        if num_blocks > free:
            assert block_ids is None
            return
        assert block_ids is not None
        assert len(block_ids) == len(set(block_ids)) == num_blocks
        assert self.taken.keys().isdisjoint(block_ids), "handed out what somebody holds"
        self.move(block_ids, BlockState.RESERVED)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def mark_used(self, data: st.DataObject) -> None:
        block_ids = self.some_of(data, BlockState.RESERVED)
        self.pool.mark_used(block_ids)
        self.move(block_ids, BlockState.USED)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block_ids = self.some_of(data, BlockState.RESERVED)
        self.pool.quarantine(block_ids)
        self.move(block_ids, BlockState.QUARANTINED)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        block_ids = self.some_of(data, BlockState.QUARANTINED)
        self.pool.unquarantine(block_ids)
        self.move(block_ids, BlockState.RESERVED)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = self.some_of(data, BlockState.RESERVED, BlockState.USED)
        self.pool.release(block_ids)
        for block_id in block_ids:
            del self.taken[block_id]
            self.frees[block_id] += 1

    @invariant()
    def pool_is_consistent(self) -> None:
        self.pool.check_invariants()

    @invariant()
    def every_block_is_in_the_state_it_was_put_in(self) -> None:
        for block_id in map(BlockId, range(NUM_BLOCKS)):
            assert self.pool.state(block_id) is self.taken.get(block_id, BlockState.FREE)

    @invariant()
    def generations_count_the_frees(self) -> None:
        assert self.pool.generations == self.frees


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_block_pool_in_any_order = PoolMachine.TestCase
