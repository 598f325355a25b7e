"""Prompts computed for others, and prompts that others computed."""

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.scheduling import (
    free_blocks,
    kinds,
    make_scheduler,
    make_spec,
    must_plan,
    run_dry,
    step,
)
from workers.engine.block_table import BlockTable
from workers.engine.events import (
    ChunkComputed,
    PromptComputed,
    SequenceReleased,
)
from workers.engine.sequence import IllegalTransitionError, SequenceMode, SequenceStatus
from workers.engine.step import SequenceId, StepResult

ZERO = SequenceId(0)
ONE = SequenceId(1)
AWAIT_KV = SequenceMode.AWAIT_KV
PREFILL_ONLY = SequenceMode.PREFILL_ONLY


def test_prefill_only_reports_chunks_then_the_first_token_and_is_held():
    scheduler = make_scheduler(prefill_chunk_tokens=4)
    scheduler.submit(make_spec(prompt=6, mode=PREFILL_ONLY, stop=frozenset({7})), 0.0)
    blocks = (BlockTable(block_ids=(BlockId(0), BlockId(1))),)
    step(scheduler)
    step(scheduler, {0: 7})
    assert scheduler.take_events()[1:] == [
        ChunkComputed(sequence_id=ZERO, num_computed=4, block_tables=blocks),
        ChunkComputed(sequence_id=ZERO, num_computed=6, block_tables=blocks),
        PromptComputed(sequence_id=ZERO, first_token=7),
    ]
    assert scheduler.status_of(ZERO) is SequenceStatus.HELD
    assert scheduler.plan(0.0) is None


def test_chunk_is_reported_when_its_step_is_over_and_not_before():
    """F47: what is reported is granted, and may be read at once."""
    scheduler = make_scheduler(prefill_chunk_tokens=4)
    scheduler.submit(make_spec(prompt=6, mode=PREFILL_ONLY), 0.0)
    for result in ({}, {0: 7}):
        plan = must_plan(scheduler)
        assert not [kind for kind in kinds(scheduler.take_events()) if kind != "Admitted"]
        scheduler.commit(StepResult(step_id=plan.step_id, token_ids=result))
        assert kinds(scheduler.take_events())[0] == "ChunkComputed"


def test_held_blocks_are_free_after_release():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    assert scheduler.pool.counts().used == 1
    assert scheduler.release(ZERO)
    assert scheduler.take_events()[-1] == SequenceReleased(sequence_id=ZERO)
    assert free_blocks(scheduler) == 16


def test_release_is_safe_to_repeat():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    scheduler.release(ZERO)
    scheduler.take_events()
    assert not scheduler.release(ZERO)
    assert scheduler.take_events() == []


def test_release_of_what_is_still_computed_is_a_mistake():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=PREFILL_ONLY), 0.0)
    with pytest.raises(IllegalTransitionError, match="is prefilling, needed held"):
        scheduler.release(ZERO)


def test_published_sequence_decodes_from_the_end_of_its_prompt():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=6, mode=AWAIT_KV), 0.0)
    assert scheduler.publish(ZERO, 42)
    (entry,) = must_plan(scheduler).sequences
    assert (entry.token_ids, entry.start) == ((42,), 6)
    assert scheduler.pool.counts().used == 2


@pytest.mark.parametrize("call", ["publish", "prefill_here", "quarantine", "fence"])
def test_word_about_an_ended_sequence_is_answered_with_false(call):
    scheduler = make_scheduler()
    arguments = (ZERO, 7) if call == "publish" else (ZERO,)
    assert not getattr(scheduler, call)(*arguments)
    assert scheduler.take_events() == []


@pytest.mark.parametrize("call", ["publish", "prefill_here", "quarantine"])
def test_word_about_a_transfer_that_was_never_asked_for_is_a_mistake(call):
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    arguments = (ZERO, 7) if call == "publish" else (ZERO,)
    with pytest.raises(IllegalTransitionError, match="is prefilling, needed awaiting_kv"):
        getattr(scheduler, call)(*arguments)
    scheduler.check_invariants()


def test_waiting_sequence_has_no_blocks_to_prefill_into():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_spec(0, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1, mode=AWAIT_KV), 0.0)
    with pytest.raises(IllegalTransitionError, match="is waiting"):
        scheduler.prefill_here(ONE)


def test_quarantined_sequence_cannot_compute_or_publish_before_the_fence():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    scheduler.quarantine(ZERO)
    with pytest.raises(IllegalTransitionError):
        scheduler.prefill_here(ZERO)
    with pytest.raises(IllegalTransitionError):
        scheduler.publish(ZERO, 7)
    assert scheduler.pool.counts().quarantined == 2


def test_fenced_sequence_can_be_tried_again():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    scheduler.quarantine(ZERO)
    assert scheduler.fence(ZERO)
    assert scheduler.publish(ZERO, 7)
    scheduler.check_invariants()


def test_fenced_sequence_can_be_prefilled_here():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV, max_tokens=1), 0.0)
    scheduler.quarantine(ZERO)
    scheduler.fence(ZERO)
    assert scheduler.prefill_here(ZERO)
    run_dry(scheduler)
    assert kinds(scheduler.take_events())[-1] == "SequenceFinished"


def test_fence_without_quarantine_changes_nothing():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    assert scheduler.fence(ZERO)
    assert scheduler.status_of(ZERO) is SequenceStatus.AWAITING_KV


@pytest.mark.parametrize("is_quarantined", [False, True])
def test_blocks_of_a_cancelled_transfer_wait_for_the_fence(is_quarantined):
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    if is_quarantined:
        scheduler.quarantine(ZERO)
    scheduler.cancel(ZERO)
    assert scheduler.pool.counts().quarantined == 2
    scheduler.check_invariants()
    assert not scheduler.fence(ZERO)
    assert free_blocks(scheduler) == 16


def test_fence_of_an_ended_sequence_admits_who_waits_for_its_blocks():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=16, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1), 0.0)
    scheduler.cancel(ZERO)
    assert scheduler.status_of(ONE) is SequenceStatus.WAITING
    scheduler.fence(ZERO)
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING


def test_id_is_not_taken_again_while_its_blocks_wait_for_the_fence():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    scheduler.cancel(ZERO)
    with pytest.raises(ValueError, match="exists already"):
        scheduler.submit(make_spec(), 0.0)
