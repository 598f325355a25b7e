import pytest

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState, BlockStateError, PoolCounts
from workers.errors import PoolTooSmallError


def make_pool(num_blocks: int = 4) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4, max_model_len=num_blocks * 4)


def taken(pool: BlockPool, num_blocks: int) -> tuple[BlockId, ...]:
    block_ids = pool.reserve(num_blocks)
    assert block_ids is not None
    return block_ids


def test_pool_below_the_window_is_refused_with_both_numbers():
    with pytest.raises(PoolTooSmallError, match=r"INV-POOL-WINDOW.* 12 tokens .* 13 tokens"):
        BlockPool(num_blocks=3, block_size=4, max_model_len=13)


def test_pool_of_exactly_one_window_is_taken():
    assert BlockPool(num_blocks=3, block_size=4, max_model_len=12).num_free == 3


def test_reserve_refuses_when_pool_is_short():
    pool = make_pool(4)
    taken(pool, 2)
    assert pool.reserve(3) is None


def test_refused_reserve_takes_nothing():
    pool = make_pool(4)
    taken(pool, 2)
    pool.reserve(3)
    assert pool.counts() == PoolCounts(total=4, free=2, reserved=2, used=0, quarantined=0)


def test_reserve_of_nothing_is_a_mistake():
    with pytest.raises(ValueError, match="at least 1"):
        make_pool().reserve(0)


def test_fresh_pool_hands_out_blocks_in_order():
    assert taken(make_pool(4), 3) == (0, 1, 2)


def test_block_freed_last_is_handed_out_first():
    pool = make_pool(4)
    first, _second = taken(pool, 1), taken(pool, 1)
    pool.release(first)
    assert taken(pool, 1) == first


def test_counts_follow_a_block_through_every_state():
    pool = make_pool(4)
    block_ids = taken(pool, 4)
    pool.mark_used(block_ids[:1])
    pool.quarantine(block_ids[1:2])
    pool.release(block_ids[2:3])
    assert pool.counts() == PoolCounts(total=4, free=1, reserved=1, used=1, quarantined=1)


def test_release_bumps_the_generation_of_each_block():
    pool = make_pool(3)
    block_ids = taken(pool, 2)
    pool.mark_used(block_ids[:1])
    pool.release(block_ids)
    assert pool.generations == [1, 1, 0]


def test_quarantined_block_is_not_released():
    pool = make_pool()
    block_ids = taken(pool, 1)
    pool.quarantine(block_ids)
    with pytest.raises(BlockStateError, match="quarantined, needed reserved or used"):
        pool.release(block_ids)


def test_quarantined_block_is_never_handed_out():
    pool = make_pool(2)
    pool.quarantine(taken(pool, 2))
    assert pool.reserve(1) is None


def test_fenced_block_is_its_owners_reservation_again():
    pool = make_pool()
    block_ids = taken(pool, 1)
    pool.quarantine(block_ids)
    pool.unquarantine(block_ids)
    assert pool.state(block_ids[0]) is BlockState.RESERVED


def test_block_is_not_released_twice():
    pool = make_pool()
    block_ids = taken(pool, 1)
    pool.release(block_ids)
    with pytest.raises(BlockStateError, match="is free"):
        pool.release(block_ids)


def test_block_named_twice_is_refused_and_nothing_changes():
    pool = make_pool()
    (block_id,) = taken(pool, 1)
    with pytest.raises(BlockStateError, match="twice"):
        pool.release((block_id, block_id))
    assert pool.counts().reserved == 1
    assert pool.generations == [0, 0, 0, 0]


@pytest.mark.parametrize("operation", ["mark_used", "quarantine", "unquarantine", "release"])
def test_operation_on_one_wrong_block_leaves_the_others_as_they_were(operation):
    pool = make_pool(2)
    (block_id,) = taken(pool, 1)
    if operation == "unquarantine":
        pool.quarantine((block_id,))
    before = pool.counts()
    with pytest.raises(BlockStateError):
        getattr(pool, operation)((block_id, BlockId(1)))
    assert pool.counts() == before


def test_blocks_for_rounds_up():
    pool = make_pool()
    assert [pool.blocks_for(tokens) for tokens in (1, 4, 5)] == [1, 1, 2]
    assert (pool.block_size, pool.num_blocks) == (4, 4)


def tamper_count(pool: BlockPool) -> None:
    pool._counts[BlockState.USED] += 1


def tamper_state(pool: BlockPool) -> None:
    pool._states[3] = BlockState.USED
    pool._counts[:] = [2, 1, 1, 0]


def tamper_free_list(pool: BlockPool) -> None:
    pool._free[0] = BlockId(0)  # taken by the test


def tamper_unknown_state(pool: BlockPool) -> None:
    pool._states[0] = 9
    pool._counts[BlockState.RESERVED] -= 1


@pytest.mark.parametrize(
    "tamper", [tamper_count, tamper_state, tamper_free_list, tamper_unknown_state]
)
def test_check_invariants_sees_a_pool_that_contradicts_itself(tamper):
    pool = make_pool(4)
    taken(pool, 1)
    pool.check_invariants()
    tamper(pool)
    with pytest.raises(AssertionError, match="INV-CONSERVE"):
        pool.check_invariants()
