"""Prefix hits where layers have a sliding window: what one takes, gives, and costs."""

import pytest

from tests.fakes.model_runner import FakeModelRunner, generate
from tests.fakes.scheduling import (
    BLOCK_SIZE,
    SCOPE,
    make_scheduler,
    make_spec,
    must_plan,
    result_of,
    rows,
    run_dry,
    step,
)
from workers.engine.events import Admitted, TokensSampled
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, SequenceMode, SequenceStatus
from workers.engine.step import SequenceId, StepResult

ZERO, ONE, TWO = SequenceId(0), SequenceId(1), SequenceId(2)
AWAIT_KV = SequenceMode.AWAIT_KV
PREFILL_ONLY = SequenceMode.PREFILL_ONLY
WINDOW = 6
"""Of blocks of 4: a hit takes the two blocks before its end."""
MIXED = (None, WINDOW)
ALL = (WINDOW,)


def warm(prompt: int, *, windows: tuple[int | None, ...], num_blocks: int = 40) -> Scheduler:
    """A scheduler that has computed a prompt 0, 1, 2 ... and is idle."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_model_len=64, windows=windows, scope=SCOPE
    )
    scheduler.submit(make_spec(0, prompt=prompt, max_tokens=1), 0.0)
    run_dry(scheduler)
    scheduler.take_events()
    return scheduler


def hit(scheduler: Scheduler) -> int:
    event = scheduler.take_events()[0]
    assert isinstance(event, Admitted)
    scheduler.check_invariants()
    return event.num_hit_tokens


def live(scheduler: Scheduler, sequence_id: SequenceId) -> Sequence:
    return scheduler._roster.live[sequence_id]


def evict(scheduler: Scheduler, num_blocks: int) -> None:
    """As others do who need the room."""
    pool = scheduler.pool
    taken = pool.reserve(pool.counts().free + num_blocks)
    assert taken is not None
    pool.release(taken)


@pytest.mark.parametrize("windows", [MIXED, ALL])
def test_prompt_is_found_again(windows):
    scheduler = warm(21, windows=windows)
    scheduler.submit(make_spec(1, prompt=21), 0.0)
    assert hit(scheduler) == 20
    (entry,) = must_plan(scheduler).sequences
    assert (entry.start, entry.block_tables[-1].start) == (20, 3)
    assert len(entry.token_ids) == 1


@pytest.mark.parametrize("windows", [MIXED, ALL])
@pytest.mark.parametrize("prompt", [5, 9, 13, 33])
def test_what_was_given_up_behind_the_window_is_found_by_shorter_texts(windows, prompt):
    scheduler = warm(41, windows=windows)
    scheduler.submit(make_spec(1, prompt=prompt), 0.0)
    assert hit(scheduler) == prompt - 1


def test_hit_ends_before_the_window_in_which_a_block_is_missing():
    """Given up first, block 0 goes first: boundaries 1 and 2 see it, 3 does not."""
    scheduler = warm(41, windows=ALL, num_blocks=20)
    evict(scheduler, 1)
    for number, (prompt, found) in enumerate([(5, 0), (9, 0), (13, 12), (41, 40)], start=1):
        scheduler.submit(make_spec(number, prompt=prompt, max_tokens=1), 0.0)
        assert hit(scheduler) == found
        scheduler.cancel(SequenceId(number))
        scheduler.take_events()


def test_block_of_a_full_group_takes_what_nobody_can_reach_without_it():
    """Five blocks in each group, of which the window gave up two before the end."""
    scheduler = warm(20, windows=MIXED, num_blocks=26)
    assert scheduler.pool.counts().cached == 10
    evict(scheduler, 2)  # blocks 0 and 1 of the window
    assert scheduler.pool.counts().cached == 8
    evict(scheduler, 1)  # the last of the full group, and with it that of the window
    assert scheduler.pool.counts().cached == 6
    scheduler.check_invariants()


def test_text_shares_the_computation_behind_a_window_and_not_the_room():
    """INV-ADMIT: with three blocks each, a third sequence has no room although blocks are free."""
    scheduler = warm(20, windows=ALL, num_blocks=16)
    for number in (1, 2, 3, 4):
        scheduler.submit(make_spec(number, prompt=21, max_tokens=40), 0.0)
    counts = scheduler.pool.counts()
    assert (counts.used, counts.reserved) == (2, 4)
    assert scheduler.pool.num_promised == 6
    for number in (5, 6):
        scheduler.submit(make_spec(number, prompt=21, max_tokens=40, salt="x"), 0.0)
    scheduler.check_invariants()
    runner = FakeModelRunner(block_size=BLOCK_SIZE, windows=ALL)
    runner.write(live(scheduler, ONE).block_tables[0].block_ids, range(12, 20))
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(runner.execute(plan))
        scheduler.check_invariants()
    tokens: dict[SequenceId, list[int]] = {}
    for event in scheduler.take_events():
        if isinstance(event, TokensSampled):
            tokens.setdefault(event.sequence_id, []).extend(event.token_ids)
    assert list(tokens.values()) == [generate(range(21), 40, ALL)] * 6


def test_equal_prompts_that_come_together_are_computed_once():
    scheduler = make_scheduler(
        num_blocks=40, max_model_len=64, step_tokens=4, windows=MIXED, scope=SCOPE
    )
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=21, max_tokens=1), 0.0)
    computed = [rows(scheduler) for _ in range(6)]
    assert computed[:5] == [[(0, start, 4)] for start in (0, 4, 8, 12, 16)]
    assert computed[5] == [(0, 20, 1), (1, 20, 1)]
    scheduler.check_invariants()


def test_prompt_goes_on_from_its_own_blocks_to_those_that_others_computed_meanwhile():
    scheduler = make_scheduler(
        num_blocks=40, max_model_len=64, step_tokens=4, windows=MIXED, scope=SCOPE
    )
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=13, max_tokens=1, looks_up=number == 1), 0.0)
        if number == 0:
            step(scheduler)
            step(scheduler)
    scheduler.submit(make_spec(2, prompt=21, max_tokens=1, salt="x"), 0.0)
    run_dry(scheduler)
    scheduler.check_invariants()
    assert scheduler.totals.hit_tokens == 12


# -- hand-off -----------------------------------------------------------------------------------


def test_awaited_prompt_holds_its_hit_beside_what_arrives():
    scheduler = warm(21, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=41, max_tokens=9, mode=AWAIT_KV), 0.0)
    (admitted,) = scheduler.take_events()
    assert admitted.num_hit_tokens == 20
    full, sliding = admitted.block_tables
    assert (full.start, sliding.start) == (0, 9)
    assert [len(aside) for aside in live(scheduler, ONE).hits_aside] == [0, 2]
    assert scheduler.pool.counts().used == 5 + 2
    scheduler.check_invariants()


def test_part_of_the_hit_that_the_output_will_see_is_in_the_table():
    scheduler = warm(21, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=22, max_tokens=9, mode=AWAIT_KV), 0.0)
    (admitted,) = scheduler.take_events()
    _, sliding = admitted.block_tables
    assert sliding.start == 4
    assert scheduler.pool.state(sliding.block(4)).name == "USED"
    assert [len(aside) for aside in live(scheduler, ONE).hits_aside] == [0, 1]
    scheduler.check_invariants()


def test_hit_aside_is_given_up_when_the_rest_has_arrived():
    scheduler = warm(21, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=40, max_tokens=9, mode=AWAIT_KV), 0.0)
    scheduler.publish(ONE, 100)
    scheduler.check_invariants()
    assert live(scheduler, ONE).hits_aside == ()
    (entry,) = must_plan(scheduler).sequences
    assert entry.block_tables[1].start == 8
    scheduler.commit(result_of(scheduler._in_flight))
    scheduler.cancel(ONE)
    scheduler.take_events()
    scheduler.submit(make_spec(2, prompt=41), 0.0)
    assert hit(scheduler) == 40


@pytest.mark.parametrize(
    ("first_tokens", "num_found"), [((), 16), ((0, 8), 16), ((0, 9), 0), ((0, 11), 0)]
)
def test_block_of_which_only_the_end_has_arrived_is_found_by_nobody(first_tokens, num_found):
    """As from blocks of another size; what follows the prompt sees from token 11 on."""
    scheduler = make_scheduler(num_blocks=40, max_model_len=64, windows=MIXED, scope=SCOPE)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=9, mode=AWAIT_KV), 0.0)
    scheduler.publish(ZERO, 100, first_tokens=first_tokens)
    run_dry(scheduler)
    scheduler.take_events()

    scheduler.submit(make_spec(1, prompt=17), 0.0)

    assert hit(scheduler) == num_found


def test_prompt_whose_rest_did_not_arrive_is_computed_from_its_hit_on():
    scheduler = warm(21, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=41, max_tokens=9, mode=AWAIT_KV), 0.0)
    scheduler.quarantine(ONE)
    scheduler.check_invariants()
    scheduler.fence(ONE)
    scheduler.prefill_here(ONE)
    scheduler.check_invariants()
    (entry,) = must_plan(scheduler).sequences
    assert (entry.start, entry.block_tables[1].start) == (20, 3)
    scheduler.commit(result_of(scheduler._in_flight))
    run_dry(scheduler)
    assert scheduler.pool.num_available == 40


def test_awaited_prompt_that_ends_gives_its_hit_back_at_once():
    scheduler = warm(21, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=41, max_tokens=9, mode=AWAIT_KV), 0.0)
    scheduler.cancel(ONE)
    assert scheduler.pool.counts().used == 0
    assert scheduler.pool.counts().quarantined > 0
    scheduler.check_invariants()
    scheduler.fence(ONE)
    assert scheduler.pool.num_available == 40


def test_hit_that_the_pool_could_never_hold_beside_what_arrives_is_left():
    """INV-ADMIT: who waits must be admitted once everybody else is gone."""
    scheduler = warm(21, windows=ALL, num_blocks=3)
    scheduler.submit(make_spec(1, prompt=41, max_tokens=20, mode=AWAIT_KV), 0.0)
    assert scheduler.status_of(ONE) is SequenceStatus.AWAITING_KV
    assert hit(scheduler) == 0


def test_room_for_what_was_to_arrive_goes_to_who_waits_when_it_is_computed_here():
    scheduler = warm(21, windows=ALL, num_blocks=7)
    scheduler.submit(make_spec(1, prompt=41, max_tokens=20, mode=AWAIT_KV), 0.0)
    assert hit(scheduler) == 20
    scheduler.submit(make_spec(2, prompt=21, max_tokens=20, salt="x"), 0.0)
    assert scheduler.status_of(TWO) is SequenceStatus.WAITING
    scheduler.prefill_here(ONE)
    assert scheduler.status_of(TWO) is SequenceStatus.PREFILLING
    scheduler.check_invariants()


def test_held_prompt_that_was_found_keeps_what_comes_after_it_will_see():
    scheduler = warm(41, windows=MIXED)
    scheduler.submit(make_spec(1, prompt=41, mode=PREFILL_ONLY), 0.0)
    event = scheduler.take_events()[0]
    assert isinstance(event, Admitted)
    assert event.num_hit_tokens == 40
    assert event.block_tables[1].start <= (41 - WINDOW + 1) // BLOCK_SIZE
    assert rows(scheduler) == [(1, 40, 1)]
    scheduler.check_invariants()


# -- KV that cannot be trusted ------------------------------------------------------------------


@pytest.mark.parametrize("windows", [MIXED, ALL])
def test_kv_that_led_to_nonsense_is_found_by_nobody(windows):
    scheduler = warm(21, windows=windows)
    scheduler.submit(make_spec(1, prompt=21, max_tokens=20), 0.0)
    scheduler.submit(make_spec(2, prompt=25, max_tokens=20), 0.0)
    plan = must_plan(scheduler)
    scheduler.commit(
        StepResult(step_id=plan.step_id, token_ids={TWO: 100}, failed={ONE: "not finite"})
    )
    scheduler.check_invariants()
    run_dry(scheduler)
    scheduler.check_invariants()
    scheduler.take_events()
    scheduler.submit(make_spec(3, prompt=25), 0.0)
    assert hit(scheduler) == 0


def test_sequence_that_has_computed_nothing_yet_still_looks_up_after_nonsense():
    scheduler = make_scheduler(
        num_blocks=6, max_model_len=64, max_sequences=1, windows=ALL, scope=SCOPE
    )
    scheduler.submit(make_spec(0, prompt=8), 0.0)
    scheduler.submit(make_spec(1, prompt=21), 0.0)
    plan = must_plan(scheduler)
    scheduler.commit(StepResult(step_id=plan.step_id, token_ids={}, failed={ZERO: "not finite"}))
    run_dry(scheduler)
    scheduler.take_events()
    scheduler.submit(make_spec(2, prompt=21), 0.0)
    assert hit(scheduler) == 20
