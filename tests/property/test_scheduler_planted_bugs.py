"""The scheduler's state machine is worth what it finds: each mistake of this list must fail it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.test_scheduler_states import SchedulerMachine
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.holdings import Holdings
from workers.engine.prefix_cache import PrefixCache, PrefixScope
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
        return block_id

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
    def find(holdings, sequence, start):
        if not sequence.spec.uses_prefix_cache:
            return ()
        return holdings.pool.cache.match(sequence.chain.keys[start:])

    patch.setattr(Holdings, "_find", find)


def find_for_those_who_must_not(patch: pytest.MonkeyPatch) -> None:
    def find(holdings, sequence, start):
        end = (sequence.num_prompt_tokens - 1) // holdings.pool.block_size
        return holdings.pool.cache.match(sequence.chain.keys[start:end])

    patch.setattr(Holdings, "_find", find)


def quarantine_the_hit_too(patch: pytest.MonkeyPatch) -> None:
    def quarantine(holdings, sequence):
        holdings.pool.quarantine(sequence.block_ids)

    patch.setattr(Holdings, "quarantine", quarantine)


def store_behind_somebody_elses_block(patch: pytest.MonkeyPatch) -> None:
    """Two equal blocks, each with its own next one: the second is held, its parent is not."""
    store = BlockPool.store

    def keep_ones_own(pool, block_id, key, parent):
        if pool.cache.block_of(key) is not None:
            return block_id
        return store(pool, block_id, key, parent)

    patch.setattr(BlockPool, "store", keep_ones_own)
    patch.setattr(Holdings, "_follows", lambda *_: True)


def store_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    store = Holdings._store

    def store_early(holdings, sequence, chain):
        num_computed = sequence.num_computed
        if num_computed < len(sequence.token_ids) - 4:
            sequence.num_computed += 4
        store(holdings, sequence, chain)
        sequence.num_computed = num_computed

    patch.setattr(Holdings, "_store", store_early)


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


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_machine_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # how it shows is the bug's own
        run_state_machine_as_test(SchedulerMachine, settings=FINDING)
