import pytest

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState, BlockStateError, PoolCounts
from workers.engine.prefix_cache import BlockKey
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
    assert BlockPool(num_blocks=3, block_size=4, max_model_len=12).num_available == 3


def test_reserve_refuses_when_pool_is_short():
    pool = make_pool(4)
    taken(pool, 2)
    assert pool.reserve(3) is None


def test_refused_reserve_takes_nothing():
    pool = make_pool(4)
    taken(pool, 2)
    pool.reserve(3)
    assert pool.counts() == PoolCounts(total=4, free=2, reserved=2, used=0, cached=0, quarantined=0)


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
    assert pool.counts() == PoolCounts(total=4, free=1, reserved=1, used=1, cached=0, quarantined=1)


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


# -- blocks that can be found -------------------------------------------------------------------

A, B, C = (BlockKey(bytes((number,)) * 16) for number in range(3))


def used(pool: BlockPool, num_blocks: int) -> tuple[BlockId, ...]:
    block_ids = taken(pool, num_blocks)
    pool.mark_used(block_ids)
    return block_ids


def stored(pool: BlockPool) -> tuple[BlockId, ...]:
    """Two used blocks in a chain."""
    first, second = used(pool, 2)
    pool.store(first, A, None)
    pool.store(second, B, A)
    return first, second


def test_keyed_block_is_cached_by_the_release_of_its_last_holder():
    pool = make_pool()
    block_ids = stored(pool)
    pool.release(block_ids)
    assert pool.counts() == PoolCounts(total=4, free=2, reserved=0, used=0, cached=2, quarantined=0)
    assert pool.num_available == 4
    assert [pool.num_holders(block_id) for block_id in block_ids] == [0, 0]


def test_hit_is_held_before_the_blocks_that_are_reserved():
    pool = make_pool()
    block_ids = stored(pool)
    pool.release(block_ids)
    table = pool.reserve(1, hits=block_ids)
    assert table is not None
    assert table[:2] == block_ids
    assert pool.states(table) == bytes((BlockState.USED, BlockState.USED, BlockState.RESERVED))


def test_block_that_is_cached_and_found_again_keeps_its_generation():
    """INV-GEN: what was granted of it is still what it holds."""
    pool = make_pool()
    block_ids = stored(pool)
    pool.release(block_ids)
    pool.reserve(1, hits=block_ids)
    pool.release(block_ids)
    assert [pool.generations[block_id] for block_id in block_ids] == [0, 0]


def test_eviction_moves_the_generation():
    pool = make_pool()
    first, second = stored(pool)
    pool.release((first, second))
    taken(pool, 3)
    assert (pool.generations[first], pool.generations[second]) == (0, 1)
    assert pool.cache.match([A, B]) == (first,)


def test_shared_block_stays_used_until_its_last_holder_releases_it():
    pool = make_pool()
    block_ids = stored(pool)
    pool.reserve(1, hits=block_ids)
    pool.reserve(1, hits=block_ids[:1])
    assert [pool.num_holders(block_id) for block_id in block_ids] == [3, 2]
    pool.release(block_ids)
    pool.release(block_ids)
    assert pool.state(block_ids[0]) is BlockState.USED
    assert pool.state(block_ids[1]) is BlockState.CACHED
    pool.check_invariants()


def test_hits_that_nobody_holds_are_not_room_for_the_rest():
    """Four blocks, two of them a hit: two are left, not four."""
    pool = make_pool()
    block_ids = stored(pool)
    pool.release(block_ids)
    assert not pool.fits(3, hits=block_ids)
    assert pool.reserve(3, hits=block_ids) is None
    assert pool.counts().cached == 2
    assert pool.fits(2, hits=block_ids)
    assert pool.reserve(2, hits=block_ids) is not None


def test_refused_reserve_leaves_the_order_of_eviction():
    pool = make_pool()
    old, new = used(pool, 2)
    pool.store(old, A, None)
    pool.store(new, B, None)
    pool.release((old,))
    pool.release((new,))
    pool.reserve(4, hits=(old,))
    taken(pool, 3)
    assert pool.cache.match([A]) == ()
    assert pool.cache.match([B]) == (new,)


@pytest.mark.parametrize("state", ["free", "reserved"])
def test_hit_on_a_block_without_kv_is_refused_and_nothing_changes(state):
    pool = make_pool()
    block_id = BlockId(3) if state == "free" else taken(pool, 1)[0]
    before = pool.counts()
    with pytest.raises(BlockStateError, match=f"is {state}, needed used or cached"):
        pool.reserve(1, hits=(block_id,))
    assert pool.counts() == before


def test_of_two_equal_blocks_the_first_is_held_by_both():
    pool = make_pool()
    first, _ = stored(pool)
    (other,) = used(pool, 1)
    assert pool.store(other, A, None) == first
    assert pool.state(other) is BlockState.FREE
    assert pool.num_holders(first) == 2


def test_reserved_block_is_not_stored():
    pool = make_pool()
    (block_id,) = taken(pool, 1)
    with pytest.raises(BlockStateError, match="is reserved, needed used"):
        pool.store(block_id, A, None)
    assert pool.cache.match([A]) == ()


def test_block_is_swapped_for_one_that_is_found():
    pool = make_pool()
    first, second = stored(pool)
    pool.release((first, second))
    (own,) = taken(pool, 1)
    pool.swap(own, first)
    assert pool.state(own) is BlockState.FREE
    assert pool.num_holders(first) == 1


def test_forgotten_blocks_are_free_once_nobody_holds_them():
    pool = make_pool()
    first, second = stored(pool)
    pool.reserve(1, hits=(first,))
    pool.release((first, second))
    pool.forget((first,))
    assert pool.state(first) is BlockState.USED
    assert pool.state(second) is BlockState.FREE
    assert pool.generations[second] == 1
    pool.release((first,))
    assert pool.state(first) is BlockState.FREE
    pool.check_invariants()


def test_block_is_not_released_more_often_than_it_is_held():
    pool = make_pool()
    block_ids = stored(pool)
    pool.release(block_ids)
    with pytest.raises(BlockStateError, match="is cached"):
        pool.release(block_ids)


def test_blocks_for_rounds_up():
    pool = make_pool()
    assert [pool.blocks_for(tokens) for tokens in (1, 4, 5)] == [1, 1, 2]
    assert (pool.block_size, pool.num_blocks) == (4, 4)


def tamper_count(pool: BlockPool) -> None:
    pool._counts[BlockState.USED] += 1


def tamper_state(pool: BlockPool) -> None:
    pool._states[3] = BlockState.USED
    pool._counts[:] = [2, 1, 1, 0, 0]


def tamper_free_list(pool: BlockPool) -> None:
    pool._free[0] = BlockId(0)  # taken by the test


def tamper_unknown_state(pool: BlockPool) -> None:
    pool._states[0] = 9
    pool._counts[BlockState.RESERVED] -= 1


def tamper_holders(pool: BlockPool) -> None:
    pool._further_holders[BlockId(0)] = 1


def tamper_cache(pool: BlockPool) -> None:
    pool.cache.let_go(BlockId(3))


@pytest.mark.parametrize(
    "tamper",
    [
        tamper_count,
        tamper_state,
        tamper_free_list,
        tamper_unknown_state,
        tamper_holders,
        tamper_cache,
    ],
)
def test_check_invariants_sees_a_pool_that_contradicts_itself(tamper):
    pool = make_pool(4)
    taken(pool, 1)
    pool.check_invariants()
    tamper(pool)
    with pytest.raises(AssertionError, match="INV-CONSERVE"):
        pool.check_invariants()


def test_exchange_hands_out_as_many_blocks_as_were_given_up_in_a_full_pool():
    pool = make_pool(4)
    block_ids = taken(pool, 4)
    pool.mark_used(block_ids)
    got = pool.exchange(block_ids[:2], 2)
    assert set(got) == set(block_ids[:2])
    assert pool.states(got) == bytes((BlockState.RESERVED,)) * 2
    assert [pool.generations[block_id] for block_id in got] == [1, 1]
    pool.check_invariants()


def test_exchange_may_take_less():
    pool = make_pool(4)
    block_ids = taken(pool, 3)
    assert pool.exchange(block_ids[:2], 0) == ()
    assert pool.num_available == 3


def test_exchange_never_takes_more_than_it_gives():
    pool = make_pool(4)
    block_ids = taken(pool, 2)
    with pytest.raises(AssertionError, match="INV-ADMIT"):
        pool.exchange(block_ids[:1], 2)
    assert pool.num_available == 2


# -- blocks that their holders pass by ------------------------------------------------------------


def passed_by(num_blocks: int = 4) -> tuple[BlockPool, BlockId]:
    """A keyed block of a group with a sliding window, held once."""
    pool = BlockPool(num_blocks=num_blocks, block_size=4, max_model_len=4, sliding_windows=(6,))
    (block_id,) = used(pool, 1)
    pool.store(block_id, A, None)
    return pool, block_id


def test_sharing_a_block_behind_a_window_takes_the_room_of_one():
    """INV-ADMIT: each holder will go on to a block of its own."""
    pool, block_id = passed_by()
    assert not pool.fits(3, hits=(block_id,))
    assert pool.reserve(2, hits=(block_id,)) is not None
    assert (pool.num_available, pool.num_promised) == (1, 1)
    assert pool.reserve(1) is None
    pool.check_invariants()


def test_holder_that_passes_a_shared_block_by_gets_the_promised_one():
    pool, block_id = passed_by()
    pool.reserve(2, hits=(block_id,))
    (taken_block,) = pool.exchange((block_id,), 1)
    assert taken_block != block_id
    assert (pool.num_available, pool.num_promised) == (0, 0)
    pool.check_invariants()
    (last,) = pool.exchange((block_id,), 1)  # of whom nobody is left: its block is evicted
    assert last == block_id
    pool.check_invariants()


def test_promise_ends_with_the_holder():
    pool, block_id = passed_by(8)
    pool.reserve(1, hits=(block_id,))
    pool.reserve(1, hits=(block_id,))
    assert pool.num_promised == 2
    pool.release((block_id,))
    assert pool.num_promised == 1
    pool.release((block_id,))
    assert pool.num_promised == 0
    pool.check_invariants()


def test_promise_outlives_the_key():
    """Forgotten, the block still has two holders, each of which will go on."""
    pool, block_id = passed_by()
    pool.reserve(1, hits=(block_id,))
    pool.forget((block_id,))
    assert pool.num_promised == 1
    pool.release((block_id,))
    assert pool.num_promised == 0
    pool.check_invariants()


def test_found_blocks_are_held_and_paid_for_in_the_exchange():
    pool, block_id = passed_by()
    pool.release((block_id,))
    own = taken(pool, 3)
    pool.share((block_id,))
    assert pool.exchange(own[:1], 0) == ()
    assert pool.num_holders(block_id) == 1
    pool.check_invariants()


def test_check_invariants_sees_promises_that_were_not_counted():
    pool, block_id = passed_by()
    pool.reserve(1, hits=(block_id,))
    pool._num_promised = 0
    with pytest.raises(AssertionError, match="INV-ADMIT: 1 blocks are promised, 0 were counted"):
        pool.check_invariants()


def test_window_that_needs_more_blocks_than_its_tokens_is_refused_by_its_blocks():
    with pytest.raises(PoolTooSmallError, match="needs 5 blocks"):
        BlockPool(num_blocks=4, block_size=4, max_model_len=12, window_blocks=5)


def test_window_that_needs_fewer_blocks_than_its_tokens_fits_a_smaller_pool():
    pool = BlockPool(num_blocks=2, block_size=4, max_model_len=100, window_blocks=2)
    assert pool.num_available == 2
