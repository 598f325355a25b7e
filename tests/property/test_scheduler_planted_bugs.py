"""The scheduler's state machine is worth what it finds: each mistake of this list must fail it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kv_transfer.geometry import KVGroup
from tests.property.test_scheduler_states import SchedulerMachine, SlidingWindowMachine
from workers.engine import prefix_hit
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.block_table import TableRules
from workers.engine.holdings import Holdings
from workers.engine.prefix_cache import PrefixCache, PrefixScope
from workers.engine.prefix_sharing import PrefixSharing
from workers.engine.sequence import SequenceMode

FINDING = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # the failure need not be small
    suppress_health_check=list(HealthCheck),
)


def leave_the_salt_out(patch: pytest.MonkeyPatch) -> None:
    chain = PrefixScope.chain
    patch.setattr(PrefixScope, "chain", lambda scope, _salt: chain(scope, ""))


def skip_the_holder_count(patch: pytest.MonkeyPatch) -> None:
    def share(pool, block_ids):
        for block_id in block_ids:
            if pool._states[block_id] == BlockState.CACHED:
                pool.cache.hold(block_id)
                pool._set((block_id,), BlockState.USED)

    patch.setattr(BlockPool, "_share", share)


def evict_the_parent_first(patch: pytest.MonkeyPatch) -> None:
    def evict(cache):
        block_id, _ = cache._idle.popitem(last=True)
        cache._drop(block_id)
        return [block_id]

    patch.setattr(PrefixCache, "evict", evict)


def let_go_of_parents_first(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda pool, ids: release(pool, tuple(reversed(ids))))


def evict_what_is_held(patch: pytest.MonkeyPatch) -> None:
    def hold(cache, block_id):
        cache._idle.move_to_end(block_id)

    patch.setattr(PrefixCache, "hold", hold)


def store_before_valid(patch: pytest.MonkeyPatch) -> None:
    take = Holdings.take

    def take_and_store(holdings, sequence):
        is_taken = take(holdings, sequence)
        if is_taken and sequence.spec.mode is SequenceMode.AWAIT_KV:
            chain, cache = sequence.chain, holdings.pool.cache
            for index in range(sequence.num_stored_blocks, len(chain.keys)):
                if cache.block_of(chain.keys[index]) is not None:
                    break
                cache.store(sequence.block_ids[index], chain.keys[index], chain.parent(index))
        return is_taken

    patch.setattr(Holdings, "take", take_and_store)


def find_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    def hit_end(sharing, sequence, start):
        if not sequence.spec.takes_hits:
            return start
        return start + len(sharing._pool.cache.match(sequence.chain.keys[start:]))

    patch.setattr(PrefixSharing, "hit_end", hit_end)


def find_for_those_who_must_not(patch: pytest.MonkeyPatch) -> None:
    def hit_end(sharing, sequence, start):
        end = (sequence.num_prompt_tokens - 1) // sharing._pool.block_size
        return start + len(sharing._pool.cache.match(sequence.chain.keys[start:end]))

    patch.setattr(PrefixSharing, "hit_end", hit_end)


def quarantine_the_hit_too(patch: pytest.MonkeyPatch) -> None:
    def quarantine(holdings, sequence):
        holdings.pool.quarantine(sequence.block_ids)

    patch.setattr(Holdings, "quarantine", quarantine)


def store_behind_somebody_elses_block(patch: pytest.MonkeyPatch) -> None:
    """Two equal blocks, each with its own next one: the second is held, its parent is not."""
    store = BlockPool.store

    def keep_ones_own(pool, block_id, key, parent, *, group):
        if pool.cache.block_of(key, group=group) is not None:
            return block_id
        return store(pool, block_id, key, parent, group=group)

    patch.setattr(BlockPool, "store", keep_ones_own)
    patch.setattr(PrefixSharing, "_follows", lambda *_: True)


def store_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    store = PrefixSharing.store

    def store_early(sharing, sequence):
        num_computed = sequence.num_computed
        if num_computed < len(sequence.token_ids) - 4:
            sequence.num_computed += 4
        store(sharing, sequence)
        sequence.num_computed = num_computed

    patch.setattr(PrefixSharing, "store", store_early)


def give_up_one_token_too_early(patch: pytest.MonkeyPatch) -> None:
    first_block = KVGroup.first_block
    patch.setattr(
        KVGroup, "first_block", lambda group, position, size: first_block(group, position + 1, size)
    )


def give_up_what_the_chunk_still_sees(patch: pytest.MonkeyPatch) -> None:
    """As if the step that is planned were over."""
    needed = TableRules.needed

    def needed_after(rules, group, num_tokens, *, position, is_decoding):
        ahead = 1 if is_decoding else rules.chunk_tokens
        return needed(rules, group, num_tokens, position=position + ahead, is_decoding=is_decoding)

    patch.setattr(TableRules, "needed", needed_after)


def give_up_while_a_step_reads(patch: pytest.MonkeyPatch) -> None:
    """The blocks of the step in flight go to whoever is admitted meanwhile."""
    take_off = Holdings.take_off

    def take_off_light(holdings, sequence_ids):
        take_off(holdings, sequence_ids)
        holdings._in_step = frozenset()

    patch.setattr(Holdings, "take_off", take_off_light)


def forget_the_block_that_a_chunk_begins_within(patch: pytest.MonkeyPatch) -> None:
    max_blocks = KVGroup.max_blocks

    def one_less(group, num_tokens, *, chunk_tokens, block_size):
        size = max_blocks(group, num_tokens, chunk_tokens=chunk_tokens, block_size=block_size)
        return size if group.sliding_window is None else max(1, size - 1)

    patch.setattr(KVGroup, "max_blocks", one_less)


def go_on_from_where_the_transfer_was_to_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "start_over", lambda *_: None)


def keep_the_room_for_chunks(patch: pytest.MonkeyPatch) -> None:
    needed = TableRules.needed

    def never_decoding(rules, group, num_tokens, *, position, is_decoding):
        return needed(rules, group, num_tokens, position=position, is_decoding=False)

    patch.setattr(TableRules, "needed", never_decoding)


def find_without_what_the_window_shows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_hit, "_last_missing", lambda *_, **__: None)


def evict_without_what_is_of_no_use_then(patch: pytest.MonkeyPatch) -> None:
    def evict(cache):
        block_id, _ = cache._idle.popitem(last=False)
        cache._drop(block_id)
        return [block_id]

    patch.setattr(PrefixCache, "evict", evict)


def promise_nothing_to_who_shares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockPool, "_takes_room", lambda pool, hit: pool._states[hit] == BlockState.CACHED
    )


def lose_the_hit_that_is_held_aside(patch: pytest.MonkeyPatch) -> None:
    start_over = Holdings.start_over

    def start_over_without(holdings, sequence):
        sequence.hits_aside = tuple(() for _ in sequence.hits_aside)
        start_over(holdings, sequence)

    patch.setattr(Holdings, "start_over", start_over_without)


def reserve_only_for_what_arrives(patch: pytest.MonkeyPatch) -> None:
    """Nothing would be left to compute the prompt with, should nothing arrive."""
    claim = TableRules._claim

    def claim_less(rules, group, num_tokens, *, hit_end, landing):
        claimed = claim(rules, group, num_tokens, hit_end=hit_end, landing=landing)
        if landing is None:
            return claimed
        _, end = rules.needed(group, num_tokens, position=landing, is_decoding=True)
        return replace(claimed, num_own=end - max(hit_end, claimed.start))

    patch.setattr(TableRules, "_claim", claim_less)


WINDOW_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    give_up_one_token_too_early,
    give_up_what_the_chunk_still_sees,
    give_up_while_a_step_reads,
    forget_the_block_that_a_chunk_begins_within,
    go_on_from_where_the_transfer_was_to_write,
    keep_the_room_for_chunks,
    find_without_what_the_window_shows,
    evict_without_what_is_of_no_use_then,
    promise_nothing_to_who_shares,
    lose_the_hit_that_is_held_aside,
    reserve_only_for_what_arrives,
)

BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    leave_the_salt_out,
    skip_the_holder_count,
    evict_the_parent_first,
    let_go_of_parents_first,
    evict_what_is_held,
    store_before_valid,
    find_the_whole_prompt,
    find_for_those_who_must_not,
    quarantine_the_hit_too,
    store_behind_somebody_elses_block,
    store_before_it_is_full,
)


@pytest.mark.parametrize("bug", WINDOW_BUGS, ids=lambda bug: bug.__name__)
def test_machine_with_sliding_windows_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # how it shows is the bug's own
        run_state_machine_as_test(SlidingWindowMachine, settings=FINDING)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_machine_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # how it shows is the bug's own
        run_state_machine_as_test(SchedulerMachine, settings=FINDING)
