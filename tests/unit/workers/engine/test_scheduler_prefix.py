"""What is found rather than computed: at admission, before a chunk, and what others may find."""

import pytest

from tests.fakes.scheduling import (
    SCOPE,
    free_blocks,
    kinds,
    make_scheduler,
    make_spec,
    must_plan,
    result_of,
    rows,
    run_dry,
    step,
)
from workers.engine.events import (
    Admitted,
    ChunkComputed,
    PromptComputed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.prefix_cache import BlockStored
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import SequenceMode, SequenceStatus
from workers.engine.step import SequenceId, StepResult

ZERO, ONE, TWO = SequenceId(0), SequenceId(1), SequenceId(2)
AWAIT_KV = SequenceMode.AWAIT_KV
PREFILL_ONLY = SequenceMode.PREFILL_ONLY


def warm_scheduler(*, prompt: int = 10, max_tokens: int = 1, **options: int) -> Scheduler:
    """A scheduler that has computed one prompt, in the empty salt, and is idle."""
    scheduler = make_scheduler(scope=SCOPE, **options)
    scheduler.pool.cache.follow()
    scheduler.submit(make_spec(0, prompt=prompt, max_tokens=max_tokens), 0.0)
    run_dry(scheduler)
    scheduler.take_events()
    return scheduler


def admitted(scheduler: Scheduler) -> Admitted:
    event = scheduler.take_events()[0]
    assert isinstance(event, Admitted)
    return event


# -- at admission -------------------------------------------------------------------------------


def test_hit_is_not_computed_again():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10), 0.0)
    assert admitted(scheduler).num_hit_tokens == 8
    assert rows(scheduler) == [(1, 8, 2)]


@pytest.mark.parametrize(("prompt", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_last_prompt_token_is_always_computed(prompt, hit):
    """Its logits give the first token; a hit is whole blocks."""
    scheduler = warm_scheduler(prompt=12)
    scheduler.submit(make_spec(1, prompt=prompt), 0.0)
    assert admitted(scheduler).num_hit_tokens == hit
    scheduler.check_invariants()


def test_output_is_found_by_the_next_turn():
    scheduler = warm_scheduler(prompt=10, max_tokens=4)  # samples token 100 throughout
    spec = make_spec(1, prompt=10)
    turn = (*spec.prompt_token_ids, 100, 100, 100, 100, 5)
    scheduler.submit(
        type(spec)(sequence_id=ONE, prompt_token_ids=turn, sampling=spec.sampling), 0.0
    )
    assert admitted(scheduler).num_hit_tokens == 12  # token 13 is sampled, but has no KV


def test_another_salt_finds_nothing():
    """INV-SALT."""
    scheduler = warm_scheduler()
    scheduler.submit(make_spec(1, prompt=10, salt="tenant"), 0.0)
    assert admitted(scheduler).num_hit_tokens == 0
    assert rows(scheduler)[0] == (1, 0, 4)


def test_sequence_that_must_not_look_up_computes_all_and_is_found_by_others():
    scheduler = make_scheduler(scope=SCOPE, prefill_chunk_tokens=8)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=10, max_tokens=1, looks_up=False), 0.0)
        assert rows(scheduler)[0] == (number, 0, 8)
        run_dry(scheduler)
    assert scheduler.totals.queried_tokens == 0
    scheduler.submit(make_spec(2, prompt=10), 0.0)
    assert rows(scheduler) == [(2, 8, 2)]


def test_without_a_scope_nothing_is_stored_or_found():
    scheduler = make_scheduler()
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=10, max_tokens=1), 0.0)
        assert rows(scheduler)[0] == (number, 0, 4)
        run_dry(scheduler)
    assert scheduler.pool.counts().free == 16
    assert scheduler.totals.queried_tokens == 0


def test_cached_blocks_are_room_for_who_needs_it():
    """INV-ADMIT: they are evicted on demand, the end of the oldest text first."""
    scheduler = warm_scheduler(num_blocks=8, prompt=20)
    assert scheduler.pool.counts().cached == 5
    scheduler.submit(make_spec(1, prompt=16, max_tokens=8, salt="other"), 0.0)
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING
    assert scheduler.pool.counts().cached == 2
    assert scheduler.totals.evicted_blocks == 3
    assert scheduler.totals.stored_blocks == 5
    scheduler.check_invariants()


def test_head_of_the_queue_is_admitted_when_its_hit_makes_it_fit():
    """It needs 6 blocks with 4 free; two of them become used by a sequence that begins alike."""
    scheduler = make_scheduler(num_blocks=8, scope=SCOPE)
    scheduler.submit(make_spec(0, prompt=9, max_tokens=6), 0.0)  # 4 blocks
    scheduler.submit(make_spec(1, prompt=9, max_tokens=15), 0.0)  # 6 blocks
    assert scheduler.status_of(ONE) is SequenceStatus.WAITING
    step(scheduler)
    scheduler.check_invariants()
    assert scheduler.status_of(ONE) is SequenceStatus.WAITING
    step(scheduler)
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING
    scheduler.check_invariants()
    assert free_blocks(scheduler) == 0


def test_shared_blocks_outlive_each_of_their_holders():
    scheduler = warm_scheduler()
    for number in (1, 2):
        scheduler.submit(make_spec(number, prompt=10), 0.0)
    scheduler.cancel(ONE)
    assert scheduler.pool.counts().used == 2
    scheduler.check_invariants()
    scheduler.cancel(TWO)
    assert scheduler.pool.counts().used == 0


def test_tokens_are_counted_as_looked_up_and_found():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10), 0.0)
    run_dry(scheduler)
    totals = scheduler.totals
    assert (totals.queried_tokens, totals.hit_tokens, totals.prompt_tokens) == (20, 8, 12)


def test_hit_is_told_with_every_token_and_at_the_end():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10, max_tokens=2), 0.0)
    run_dry(scheduler)
    told = [
        event.num_hit_tokens
        for event in scheduler.take_events()
        if isinstance(event, TokensSampled | SequenceFinished)
    ]
    assert told == [8, 8, 8]


def test_cache_events_name_each_block_with_the_one_before_it():
    scheduler = warm_scheduler(prompt=10)
    chain = SCOPE.chain("")
    chain.extend(range(8), 2)
    assert scheduler.pool.cache.take_events().events == (
        BlockStored(key=chain.keys[0], parent=None),
        BlockStored(key=chain.keys[1], parent=chain.keys[0]),
    )


# -- while a prompt is computed -----------------------------------------------------------------


def test_prompts_that_come_together_compute_their_beginning_once():
    scheduler = make_scheduler(scope=SCOPE, step_tokens=4)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=9, max_tokens=1), 0.0)
    assert [rows(scheduler) for _ in range(3)] == [
        [(0, 0, 4)],
        [(0, 4, 4)],
        [(0, 8, 1), (1, 8, 1)],
    ]


def test_blocks_given_back_for_found_ones_are_room_for_the_next():
    scheduler = make_scheduler(num_blocks=8, step_tokens=4, scope=SCOPE)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=9, max_tokens=3), 0.0)  # 3 blocks
    scheduler.submit(make_spec(2, prompt=9, max_tokens=3, salt="other"), 0.0)
    assert scheduler.status_of(TWO) is SequenceStatus.WAITING
    for _ in range(2):
        step(scheduler)
    plan = must_plan(scheduler)
    assert scheduler.status_of(TWO) is SequenceStatus.PREFILLING
    scheduler.commit(result_of(plan))
    scheduler.check_invariants()


def test_equal_prompts_in_one_step_end_up_with_the_same_blocks():
    scheduler = make_scheduler(scope=SCOPE)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=4, max_tokens=4), 0.0)
    plan = step(scheduler)
    assert [entry.start for entry in plan.sequences] == [0, 0]
    first, second = must_plan(scheduler).sequences
    (ones,), (others,) = first.block_tables, second.block_tables
    assert ones.block_ids[0] == others.block_ids[0]
    assert ones.block_ids[1] != others.block_ids[1]
    assert scheduler.pool.counts().used == 1
    scheduler.check_invariants()


def test_block_that_fills_in_two_chunks_is_found_after_the_second():
    scheduler = make_scheduler(scope=SCOPE, step_tokens=4, prefill_chunk_tokens=3)
    scheduler.pool.cache.follow()
    scheduler.submit(make_spec(0, prompt=6), 0.0)
    step(scheduler)
    assert scheduler.pool.cache.take_events().events == ()
    step(scheduler)
    assert len(scheduler.pool.cache.take_events().events) == 1


def test_kv_that_led_to_nonsense_is_found_by_nobody():
    """Otherwise one bad moment would make every request that begins alike fail for ever."""
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10), 0.0)
    scheduler.submit(make_spec(2, prompt=14), 0.0)
    plan = must_plan(scheduler)
    scheduler.commit(
        StepResult(step_id=plan.step_id, token_ids={TWO: 100}, failed={ONE: "not finite"})
    )
    scheduler.check_invariants()
    run_dry(scheduler)
    scheduler.check_invariants()
    scheduler.submit(make_spec(3, prompt=10), 0.0)
    assert rows(scheduler) == [(3, 0, 4)]


# -- hand-offs ----------------------------------------------------------------------------------


def test_prefill_tells_its_hit_and_keeps_the_hit_for_the_reader():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10, mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    events = scheduler.take_events()
    assert kinds(events) == ["Admitted", "ChunkComputed", "PromptComputed"]
    assert isinstance(events[1], ChunkComputed)
    assert events[1].num_computed == 10
    assert events[2] == PromptComputed(sequence_id=ONE, first_token=100, num_hit_tokens=8)
    assert scheduler.pool.counts().used == 3


def test_hit_of_a_sequence_that_awaits_kv_is_never_in_quarantine():
    """INV-FENCE is for blocks that a transfer writes to: others may be reading these."""
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10, mode=AWAIT_KV), 0.0)
    scheduler.quarantine(ONE)
    counts = scheduler.pool.counts()
    assert (counts.used, counts.quarantined) == (2, 2)
    scheduler.check_invariants()
    scheduler.cancel(ONE)
    counts = scheduler.pool.counts()
    assert (counts.cached, counts.quarantined) == (2, 2)
    scheduler.check_invariants()
    scheduler.fence(ONE)
    assert scheduler.pool.counts().quarantined == 0


def test_sequence_that_ends_during_its_transfer_gives_its_hit_back_at_once():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=10, mode=AWAIT_KV), 0.0)
    scheduler.cancel(ONE)
    counts = scheduler.pool.counts()
    assert (counts.cached, counts.used, counts.quarantined) == (2, 0, 2)


def test_blocks_that_arrive_are_found_only_after_valid():
    """INV-COVER, for whoever begins alike."""
    scheduler = make_scheduler(scope=SCOPE)
    scheduler.submit(make_spec(0, prompt=10, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1, prompt=10, mode=AWAIT_KV), 0.0)
    assert [event.num_hit_tokens for event in scheduler.take_events()] == [0, 0]
    scheduler.publish(ZERO, 100)
    scheduler.submit(make_spec(2, prompt=10, mode=AWAIT_KV), 0.0)
    assert scheduler.take_events()[-1].num_hit_tokens == 8


def test_second_of_two_transfers_of_one_text_takes_over_the_blocks_of_the_first():
    scheduler = make_scheduler(scope=SCOPE)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=10, mode=AWAIT_KV), 0.0)
        scheduler.publish(SequenceId(number), 100)
    first, second = must_plan(scheduler).sequences
    assert first.block_tables[0].block_ids[:2] == second.block_tables[0].block_ids[:2]
    scheduler.check_invariants()


def test_prompt_is_computed_here_from_its_hit_on():
    scheduler = warm_scheduler(prompt=10)
    scheduler.submit(make_spec(1, prompt=14, mode=AWAIT_KV), 0.0)
    scheduler.prefill_here(ONE)
    assert rows(scheduler) == [(1, 8, 4)]
