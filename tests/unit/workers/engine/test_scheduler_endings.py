"""Cancel, deadlines and failures: who ends, and when its blocks are free."""

import pytest

from tests.fakes.scheduling import (
    free_blocks,
    kinds,
    make_scheduler,
    make_spec,
    must_plan,
    result_of,
    rows,
    step,
)
from workers.engine.events import (
    SequenceFailed,
    TokensSampled,
)
from workers.engine.sequence import SequenceMode, SequenceStatus
from workers.engine.step import SequenceId, StepResult
from workers.errors import (
    DeadlineExceededError,
    StepFailedError,
    WorkerStoppingError,
)

ZERO = SequenceId(0)
ONE = SequenceId(1)
TWO = SequenceId(2)
AWAIT_KV = SequenceMode.AWAIT_KV
PREFILL_ONLY = SequenceMode.PREFILL_ONLY


def test_cancel_is_safe_to_repeat():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    assert [scheduler.cancel(ZERO), scheduler.cancel(ZERO)] == [True, False]
    assert kinds(scheduler.take_events()) == ["Admitted", "SequenceAborted"]


def test_cancel_of_a_waiting_sequence_takes_its_ticket_out():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_spec(0), 0.0)
    scheduler.submit(make_spec(1), 0.0)
    scheduler.cancel(ONE)
    assert scheduler.num_waiting == 0
    scheduler.check_invariants()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_blocks_of_a_sequence_in_flight_are_freed_only_at_the_commit(steps_before):
    """Prefilling and decoding alike: the forward pass is still writing."""
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    for _ in range(steps_before):
        step(scheduler)
    plan = must_plan(scheduler)
    scheduler.cancel(ZERO)
    assert free_blocks(scheduler) == 14
    scheduler.check_invariants()
    scheduler.commit(result_of(plan))
    assert free_blocks(scheduler) == 16


def test_token_of_a_sequence_cancelled_in_flight_is_nobodys():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    plan = must_plan(scheduler)
    scheduler.cancel(ZERO)
    scheduler.commit(result_of(plan))
    assert kinds(scheduler.take_events()) == ["Admitted", "SequenceAborted"]


def test_sequence_that_is_not_in_the_step_in_flight_is_freed_at_once():
    scheduler = make_scheduler(step_tokens=4)
    scheduler.submit(make_spec(0, prompt=8), 0.0)
    scheduler.submit(make_spec(1, prompt=8), 0.0)
    must_plan(scheduler)
    scheduler.cancel(ONE)
    assert free_blocks(scheduler) == 13


def test_cancel_of_a_held_sequence_frees_it():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    scheduler.cancel(ZERO)
    assert free_blocks(scheduler) == 16
    assert kinds(scheduler.take_events())[-1] == "SequenceAborted"


@pytest.mark.parametrize("mode", [SequenceMode.GENERATE, AWAIT_KV])
def test_sequence_fails_at_its_deadline(mode):
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=mode, deadline=5.0), 0.0)
    scheduler.expire(4.9)
    assert scheduler.num_live == 1
    scheduler.expire(5.0)
    event = scheduler.take_events()[-1]
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, DeadlineExceededError)


def test_waiting_sequence_fails_at_its_deadline():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_spec(0), 0.0)
    scheduler.submit(make_spec(1, deadline=5.0), 0.0)
    assert scheduler.plan(6.0) is not None
    assert scheduler.num_waiting == 0


def test_held_sequence_outlives_its_deadline():
    """Its reader's lease is what limits it: the blocks may be read right now."""
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=PREFILL_ONLY, deadline=5.0), 0.0)
    step(scheduler)
    scheduler.expire(6.0)
    assert scheduler.status_of(ZERO) is SequenceStatus.HELD
    assert scheduler.next_deadline is None


def test_next_deadline_is_the_earliest():
    scheduler = make_scheduler()
    for number, deadline in enumerate((9.0, 5.0, None)):
        scheduler.submit(make_spec(number, deadline=deadline), 0.0)
    assert scheduler.next_deadline == 5.0
    scheduler.expire(5.0)
    assert scheduler.next_deadline == 9.0


def test_without_deadlines_there_is_no_next_one():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    assert scheduler.next_deadline is None


def test_expiry_makes_room_for_who_waits():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_spec(0, deadline=5.0), 0.0)
    scheduler.submit(make_spec(1), 0.0)
    (entry,) = must_plan(scheduler, now=5.0).sequences
    assert entry.sequence_id == ONE


def test_failed_step_ends_what_was_in_it_and_nothing_else():
    scheduler = make_scheduler(step_tokens=4)
    scheduler.submit(make_spec(0, prompt=8), 0.0)
    scheduler.submit(make_spec(1, prompt=8), 0.0)
    scheduler.take_events()
    must_plan(scheduler)
    error = StepFailedError("broken")
    scheduler.fail_step(error)
    assert scheduler.take_events() == [SequenceFailed(sequence_id=ZERO, error=error)]
    assert rows(scheduler) == [(1, 0, 4)]
    scheduler.check_invariants()


def test_failed_step_does_not_end_a_cancelled_sequence_twice():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    must_plan(scheduler)
    scheduler.cancel(ZERO)
    scheduler.fail_step(StepFailedError("broken"))
    assert kinds(scheduler.take_events()) == ["Admitted", "SequenceAborted"]
    assert free_blocks(scheduler) == 16


def test_fail_step_without_a_step_is_a_bug():
    with pytest.raises(AssertionError, match="no step is in flight"):
        make_scheduler().fail_step(StepFailedError("broken"))


def test_sequence_that_the_runner_gives_up_fails_alone():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(0), 0.0)
    scheduler.submit(make_spec(1), 0.0)
    plan = must_plan(scheduler)
    result = StepResult(
        step_id=plan.step_id, token_ids={ONE: 5}, failed={ZERO: "logits are not finite"}
    )
    scheduler.take_events()
    scheduler.commit(result)
    failed, sampled = scheduler.take_events()
    assert isinstance(failed, SequenceFailed)
    assert isinstance(failed.error, StepFailedError)
    assert str(failed.error) == "logits are not finite"
    assert sampled == TokensSampled(sequence_id=ONE, token_ids=(5,))
    scheduler.check_invariants()


def test_result_of_another_step_is_refused():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    must_plan(scheduler)
    with pytest.raises(ValueError, match="result of step 9, in flight is 0"):
        scheduler.commit(StepResult(step_id=9, token_ids={ZERO: 1}))


def test_result_without_a_step_is_refused():
    with pytest.raises(ValueError, match="in flight is none"):
        make_scheduler().commit(StepResult(step_id=0, token_ids={}))


def test_result_that_lacks_a_token_is_refused_and_changes_nothing():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    plan = must_plan(scheduler)
    with pytest.raises(ValueError, match=r"no token for sequences \[0\]"):
        scheduler.commit(StepResult(step_id=plan.step_id, token_ids={}))
    scheduler.commit(result_of(plan))
    assert kinds(scheduler.take_events()) == ["Admitted", "TokensSampled"]


def test_fail_all_ends_every_sequence_in_every_state():
    scheduler = make_scheduler(max_sequences=3)
    scheduler.submit(make_spec(0, mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    for number, mode in enumerate((AWAIT_KV, AWAIT_KV, SequenceMode.GENERATE), 1):
        scheduler.submit(make_spec(number, mode=mode), 0.0)
    scheduler.submit(make_spec(4), 0.0)
    scheduler.quarantine(TWO)
    plan = must_plan(scheduler)
    scheduler.take_events()
    scheduler.fail_all(WorkerStoppingError("stopping"))
    assert kinds(scheduler.take_events()) == ["SequenceFailed"] * 5
    scheduler.check_invariants()
    scheduler.commit(result_of(plan))
    scheduler.fence(ONE)
    scheduler.fence(TWO)
    assert free_blocks(scheduler) == 16
