"""What an engine learns of its own speed, and the prompt tokens that it takes while streams run."""

from __future__ import annotations

import pytest

from tests.fakes.scheduling import BLOCK_SIZE, make_scheduler, make_spec, must_plan, rows, step
from workers.engine.pace import FEW_TOKENS, StepPace
from workers.engine.sequence import SequenceMode
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan


def plan_of(*, streams: int = 0, prompt: int = 0) -> StepPlan:
    sizes = [1] * streams + [prompt] * (prompt > 0)
    entries = tuple(
        ScheduledSequence(
            sequence_id=SequenceId(number),
            token_ids=(0,) * size,
            start=0,
            block_tables=(),
            sampling=None,
        )
        for number, size in enumerate(sizes)
    )
    return StepPlan(step_id=0, sequences=entries, num_streams=streams)


def test_nothing_is_known_before_the_first_step():
    pace = StepPace()
    assert pace.prompt_token_s is None
    assert pace.streams_s(3) == 0.0
    assert pace.prompt_tokens_within(1.0, 3) == FEW_TOKENS


def test_prompt_alone_costs_what_its_step_took():
    pace = StepPace()
    pace.observe(plan_of(prompt=100), 2.0)
    assert pace.prompt_token_s == pytest.approx(0.02)


def test_prompt_beside_streams_costs_what_it_added():
    pace = StepPace()
    pace.observe(plan_of(streams=2), 0.5)
    pace.observe(plan_of(streams=4), 0.7)
    pace.observe(plan_of(streams=3, prompt=10), 1.6)
    assert pace.streams_s(4) == pytest.approx(0.7)
    assert pace.prompt_token_s == pytest.approx(0.1)
    assert pace.streams_s(0) == pytest.approx(0.3), "what a step takes before its first row"


def test_fixed_part_of_a_step_is_not_the_prompts_where_it_is_known():
    pace = StepPace()
    pace.observe(plan_of(streams=2), 0.5)
    pace.observe(plan_of(streams=4), 0.7)
    pace.observe(plan_of(prompt=10), 1.3)
    assert pace.prompt_token_s == pytest.approx(0.1)


def test_step_that_was_quicker_than_its_streams_alone_adds_nothing():
    pace = StepPace()
    pace.observe(plan_of(streams=2), 5.0)
    pace.observe(plan_of(streams=2, prompt=10), 1.0)
    assert pace.prompt_token_s == 0.0
    assert pace.prompt_tokens_within(9.0, 2) == FEW_TOKENS, "nothing costs nothing"


def test_tokens_within_a_time_are_those_that_the_streams_leave_room_for():
    pace = StepPace()
    pace.observe(plan_of(prompt=10), 1.0)
    pace.observe(plan_of(streams=2), 0.5)
    assert pace.prompt_tokens_within(0.86, 2) == 3
    assert pace.prompt_tokens_within(0.2, 2) == 0


# -- the scheduler's use of it --------------------------------------------------------------------


def streaming(gap_target_s: float | None, step_target_s: float | None = None):
    """A scheduler with one stream of 0.5 s a step, prompts at 0.1 s a token, and one waiting."""
    scheduler = make_scheduler(
        step_tokens=16,
        prefill_chunk_tokens=16,
        step_target_s=step_target_s,
        gap_target_s=gap_target_s,
        num_blocks=32,
    )
    scheduler.submit(make_spec(0, prompt=10, max_tokens=9), 0.0)
    scheduler.pace.observe(step(scheduler), 1.0)
    scheduler.pace.observe(step(scheduler), 0.5)
    scheduler.submit(make_spec(1, prompt=15), 0.0)
    return scheduler


@pytest.mark.parametrize(
    ("gap_target_s", "expected"),
    [(None, 15), (1.35, 8), (99.0, 15), (0.1, BLOCK_SIZE)],
    ids=["no target", "bounded", "roomy", "a block at least"],
)
def test_prompt_tokens_beside_streams_fit_the_gap_target(gap_target_s, expected):
    scheduler = streaming(gap_target_s)
    assert scheduler.load().step_tokens == min(15, expected)
    assert rows(scheduler) == [(0, 11, 1), (1, 0, expected)]


def test_no_stream_no_gap():
    scheduler = make_scheduler(step_tokens=8, prefill_chunk_tokens=8, gap_target_s=0.1)
    scheduler.submit(make_spec(prompt=16), 0.0)
    scheduler.pace.observe(step(scheduler), 100.0)
    assert rows(scheduler) == [(0, 8, 8)]


@pytest.mark.parametrize(
    ("step_target_s", "expected"),
    [(None, 200), (9.1, 88), (99.0, 200), (0.1, FEW_TOKENS)],
    ids=["no target", "whole blocks", "roomy", "some at least"],
)
def test_prompt_tokens_without_streams_fit_the_step_target(step_target_s, expected):
    scheduler = make_scheduler(
        step_tokens=200,
        prefill_chunk_tokens=200,
        step_target_s=step_target_s,
        max_model_len=512,
        num_blocks=128,
    )
    scheduler.submit(make_spec(prompt=400), 0.0)
    plan = step(scheduler)
    scheduler.pace.observe(plan, 0.1 * plan.num_tokens)
    assert scheduler.load().step_tokens == expected
    assert rows(scheduler) == [(0, plan.num_tokens, expected)]


@pytest.mark.parametrize(("step_target_s", "gap_target_s"), [(1.35, 99.0), (99.0, 1.35)])
def test_of_two_targets_the_shorter_one_counts_beside_streams(step_target_s, gap_target_s):
    scheduler = streaming(gap_target_s, step_target_s)
    assert rows(scheduler) == [(0, 11, 1), (1, 0, 8)]


@pytest.mark.parametrize("targets", [{"gap_target_s": 0.1}, {"step_target_s": 0.1}])
def test_first_prompt_shows_how_many_tokens_fit(targets):
    limits = {"step_tokens": 256, "prefill_chunk_tokens": 256, "num_blocks": 64}
    scheduler = make_scheduler(max_model_len=256, **limits, **targets)
    scheduler.submit(make_spec(0, mode=SequenceMode.AWAIT_KV), 0.0)
    scheduler.publish(SequenceId(0), 100)
    scheduler.submit(make_spec(1, prompt=200), 0.0)
    assert rows(scheduler) == [(0, 4, 1), (1, 0, FEW_TOKENS)]


@pytest.mark.parametrize("name", ["step_target_s", "gap_target_s"])
def test_target_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=name):
        make_scheduler(**{name: 0.0})


def test_plan_says_how_many_of_its_sequences_stream():
    plan = must_plan(streaming(None))
    assert (plan.num_streams, plan.num_tokens) == (1, 16)


def test_load_counts_the_prompt_tokens_that_are_still_to_be_computed_here():
    scheduler = make_scheduler(num_blocks=8, step_tokens=4)
    assert scheduler.load().queued_tokens == 0
    scheduler.submit(make_spec(0, mode=SequenceMode.AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1, prompt=10), 0.0)
    scheduler.submit(make_spec(2, prompt=12, max_tokens=8), 0.0)
    scheduler.submit(make_spec(3, prompt=9, mode=SequenceMode.AWAIT_KV), 0.0)
    assert scheduler.num_waiting == 2
    assert scheduler.load().queued_tokens == 10 + 12
    step(scheduler)
    assert scheduler.load().queued_tokens == 6 + 12
    scheduler.prefill_here(SequenceId(0))
    assert scheduler.load().queued_tokens == 6 + 12 + 4


def test_load_shows_the_streams_and_the_pace():
    load = streaming(1.35).load()
    assert (load.num_streams, load.streams_s, load.step_tokens) == (1, 0.5, 8)
    assert load.prompt_token_s == pytest.approx(0.1)
