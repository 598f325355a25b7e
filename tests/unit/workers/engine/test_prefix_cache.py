"""Keys of blocks, and the order in which blocks are given up."""

import pytest

from kv_transfer.geometry import BlockId
from workers.engine.prefix_cache import (
    BlockEvicted,
    BlockKey,
    BlockStored,
    CacheEvents,
    PrefixCache,
    PrefixScope,
)

SCOPE = PrefixScope(fingerprint="0123456789abcdef" * 2, block_size=4)
TOKENS = tuple(range(100, 112))
A, B, C, D = (BlockKey(bytes((number,)) * 16) for number in range(4))


def keys_of(tokens=TOKENS, *, salt="", scope=SCOPE):
    chain = scope.chain(salt)
    chain.extend(tokens, len(tokens) // scope.block_size)
    return chain.keys


def filled(*links, max_events=100, **options):
    """A cache of (block, key, parent), all held, which somebody follows."""
    cache = PrefixCache(**options)
    cache.follow(max_events=max_events)
    for block_id, key, parent in links:
        cache.store(BlockId(block_id), key, parent)
    return cache


def chain_of_three(**options):
    return filled((10, A, None), (11, B, A), (12, C, B), **options)


# -- keys ---------------------------------------------------------------------------------------


def test_key_has_128_bits_and_each_block_its_own():
    keys = keys_of()
    assert [len(key) for key in keys] == [16, 16, 16]
    assert len(set(keys)) == 3


def test_equal_text_has_equal_keys_as_far_as_it_is_equal():
    other = (*TOKENS[:8], 1, 2, 3, 4)
    assert keys_of(other)[:2] == keys_of()[:2]
    assert keys_of(other)[2] != keys_of()[2]


def test_key_depends_on_everything_before_its_block():
    assert keys_of((1, *TOKENS[1:]))[2] != keys_of()[2]


def test_equal_blocks_at_two_places_have_two_keys():
    first, second = keys_of((1, 2, 3, 4) * 2)
    assert first != second


@pytest.mark.parametrize("salt", ["a", "b", " ", "\0", "ä"])
def test_no_key_of_one_salt_is_a_key_of_another(salt):
    """INV-SALT."""
    assert not set(keys_of(salt=salt)) & set(keys_of())


@pytest.mark.parametrize(
    "scope",
    [
        PrefixScope(fingerprint="f" * 32, block_size=4),
        PrefixScope(fingerprint=SCOPE.fingerprint, block_size=3),
    ],
    ids=["layout", "block size"],
)
def test_no_key_of_one_model_or_layout_is_a_key_of_another(scope):
    assert not set(keys_of(scope=scope)) & set(keys_of())


def test_salt_that_looks_like_a_block_leads_to_other_keys():
    assert keys_of(salt=str(TOKENS[:4])) != keys_of()[1:]


def test_token_ids_are_hashed_as_numbers_not_as_their_digits():
    assert keys_of((1, 23, 4, 5)) != keys_of((12, 3, 4, 5))


def test_chain_computes_each_key_once_and_goes_on_from_there():
    chain = SCOPE.chain("")
    chain.extend(TOKENS, 1)
    first = chain.keys[0]
    chain.extend(TOKENS, 3)
    assert chain.keys == keys_of()
    assert chain.keys[0] is first
    assert [chain.parent(index) for index in range(3)] == [None, *chain.keys[:2]]


def test_keys_are_the_same_in_every_process():
    """Routers compare them across hosts."""
    assert keys_of()[0].hex() == "d11f9023b8ff4f8e4e5975d7924c5f74"


# -- found --------------------------------------------------------------------------------------


def test_match_ends_at_the_first_key_that_is_missing():
    cache = filled((10, A, None), (12, C, B))
    assert cache.match([A, B, C]) == (10,)
    assert cache.match([B, C]) == ()
    assert cache.match([]) == ()
    assert (cache.block_of(C), cache.block_of(B)) == (12, None)


def test_stored_block_is_keyed_until_it_is_evicted():
    cache = chain_of_three()
    assert cache.is_keyed(BlockId(10))
    for block_id in (12, 11, 10):
        cache.let_go(BlockId(block_id))
    assert cache.evict() == [12]
    assert not cache.is_keyed(BlockId(12))
    assert cache.match([A, B, C]) == (10, 11)


# -- given up -----------------------------------------------------------------------------------


def test_what_nobody_holds_is_evicted_in_the_order_in_which_it_was_let_go():
    cache = chain_of_three()
    for block_id in (12, 11, 10):
        cache.let_go(BlockId(block_id))
    assert [cache.evict() for _ in range(3)] == [[12], [11], [10]]
    assert cache.num_evicted == 3


def test_block_that_was_used_again_is_the_last_to_go():
    cache = filled((10, A, None), (11, B, None))
    cache.let_go(BlockId(10))
    cache.let_go(BlockId(11))
    cache.hold(BlockId(10))
    assert cache.num_idle == 1
    cache.let_go(BlockId(10))
    assert [cache.evict(), cache.evict()] == [[11], [10]]


def test_held_blocks_are_not_evicted():
    cache = chain_of_three()
    assert cache.num_idle == 0
    with pytest.raises(KeyError):
        cache.evict()


def test_forgotten_block_takes_all_with_it_that_was_computed_from_it():
    cache = filled((10, A, None), (11, B, A), (12, C, B), (13, D, A))
    for block_id in (12, 13):
        cache.let_go(BlockId(block_id))
    assert cache.forget([BlockId(11), BlockId(99)]) == [12]
    assert cache.match([A, B]) == (10,)
    assert cache.match([D]) == (13,)
    assert cache.num_idle == 1
    cache.check_invariants(idle=[BlockId(13)])


# -- groups of layers -----------------------------------------------------------------------------


def test_a_key_has_a_block_in_each_group():
    cache = PrefixCache(sliding_windows=(None, 6))
    cache.store(BlockId(10), A, None)
    cache.store(BlockId(11), A, None, group=1)
    assert [cache.block_of(A, group=group) for group in (0, 1)] == [10, 11]
    assert [cache.is_passed_by(BlockId(block_id)) for block_id in (10, 11)] == [False, True]


def in_groups(*windows):
    """Key A in every group, in blocks 10, 11, ..., which nobody holds."""
    cache = PrefixCache(sliding_windows=windows)
    cache.follow()
    for group in range(len(windows)):
        cache.store(BlockId(10 + group), A, None, group=group)
        cache.let_go(BlockId(10 + group))
    return cache


@pytest.mark.parametrize(
    ("oldest", "gone"), [(10, [10, 11, 12, 13]), (11, [11, 12, 13]), (12, [12]), (13, [12, 13])]
)
def test_evicted_block_takes_those_of_its_key_in_groups_that_see_no_farther(oldest, gone):
    cache = in_groups(None, 9, 3, 6)
    cache._idle.move_to_end(BlockId(oldest), last=False)
    assert sorted(cache.evict()) == gone
    assert cache.num_evicted == len(gone)
    cache.check_invariants(idle=[BlockId(i) for i in (10, 11, 12, 13) if i not in gone])


def test_block_behind_a_window_may_go_before_those_after_it():
    cache = PrefixCache(sliding_windows=(6,))
    for block_id, key, parent in ((10, A, None), (11, B, A)):
        cache.store(BlockId(block_id), key, parent)
    cache.let_go(BlockId(10))
    assert cache.evict() == [10]
    cache.check_invariants(idle=[])
    assert cache.block_of(B) == 11


def test_where_all_layers_forget_everything_is_forgotten_with_one_block():
    """What was computed from it may have no block in between any more."""
    cache = PrefixCache(sliding_windows=(6,))
    for block_id, key, parent in ((10, A, None), (12, C, B), (13, D, None)):
        cache.store(BlockId(block_id), key, parent)
    cache.let_go(BlockId(13))
    assert cache.forget([BlockId(10)]) == [13]
    assert [cache.block_of(key) for key in (A, C, D)] == [None, None, None]


def test_events_name_the_group():
    cache = in_groups(None, 6)
    cache.evict()
    assert cache.take_events().events == (
        BlockStored(key=A, parent=None, group=0),
        BlockStored(key=A, parent=None, group=1),
        BlockEvicted(key=A, parent=None, group=0),
        BlockEvicted(key=A, parent=None, group=1),
    )


# -- events -------------------------------------------------------------------------------------


def test_events_tell_what_was_stored_and_evicted_once():
    cache = chain_of_three()
    cache.let_go(BlockId(12))
    cache.evict()
    taken = cache.take_events()
    assert taken.events == (
        BlockStored(key=A, parent=None),
        BlockStored(key=B, parent=A),
        BlockStored(key=C, parent=B),
        BlockEvicted(key=C, parent=B),
    )
    assert taken.num_lost == 0
    assert cache.take_events().events == ()


def test_for_nobody_nothing_is_kept_but_counts():
    cache = PrefixCache()
    cache.store(BlockId(10), A, None)
    cache.store(BlockId(11), B, A)
    cache.let_go(BlockId(11))
    cache.evict()
    assert (cache.num_stored, cache.num_evicted) == (2, 1)
    assert cache.take_events() == CacheEvents(events=(), num_lost=3)
    cache.follow()
    cache.store(BlockId(11), B, A)
    assert cache.take_events() == CacheEvents(events=(BlockStored(key=B, parent=A),), num_lost=0)


def test_events_that_nobody_takes_are_bounded_and_the_loss_is_told():
    cache = chain_of_three(max_events=2)
    taken = cache.take_events()
    assert [event.key for event in taken.events] == [B, C]
    assert taken.num_lost == 1
    assert cache.take_events().num_lost == 0


def test_forgotten_blocks_are_told_children_first():
    cache = chain_of_three()
    cache.take_events()
    cache.forget([BlockId(10)])
    assert [event.key for event in cache.take_events().events] == [C, B, A]


# -- self-check ---------------------------------------------------------------------------------


def swap_keys(cache):
    (blocks,) = cache._blocks
    blocks[A], blocks[B] = blocks[B], blocks[A]


def let_go_of_the_parent_first(cache):
    cache._idle.move_to_end(BlockId(12))


def lose_the_parent(cache):
    del cache._idle[BlockId(10)]
    cache._drop(BlockId(10))


def hold_the_child_alone(cache):
    cache.hold(BlockId(12))


@pytest.mark.parametrize(
    ("tamper", "invariant"),
    [
        (swap_keys, "INV-SALT"),
        (let_go_of_the_parent_first, "INV-CONSERVE.*would go after"),
        (lose_the_parent, "INV-CONSERVE.*left behind"),
        (hold_the_child_alone, "INV-CONSERVE.*is held"),
    ],
)
def test_check_invariants_sees_a_cache_that_contradicts_itself(tamper, invariant):
    cache = chain_of_three()
    for block_id in (12, 11, 10):
        cache.let_go(BlockId(block_id))
    cache.check_invariants(idle=list(cache._idle))
    tamper(cache)
    with pytest.raises(AssertionError, match=invariant):
        cache.check_invariants(idle=list(cache._idle))


def lose_the_one_that_sees_farther(cache):
    del cache._idle[BlockId(10)]
    cache._drop(BlockId(10))


def hold_only_the_one_that_forgets(cache):
    cache.hold(BlockId(11))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [(lose_the_one_that_sees_farther, "left without"), (hold_only_the_one_that_forgets, "is held")],
)
def test_check_invariants_sees_groups_that_contradict_each_other(tamper, message):
    cache = in_groups(None, 6)
    cache.check_invariants(idle=list(cache._idle))
    tamper(cache)
    with pytest.raises(AssertionError, match=f"INV-CONSERVE.*{message}"):
        cache.check_invariants(idle=list(cache._idle))


def test_check_invariants_sees_a_pool_that_counts_other_blocks_as_cached():
    with pytest.raises(AssertionError, match=r"INV-CONSERVE.*idle"):
        chain_of_three().check_invariants(idle=[BlockId(10)])
