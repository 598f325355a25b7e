"""What the scheduler tells the runner about sampling, and what it passes on of it."""

from __future__ import annotations

from array import array

import pytest

from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.model_runner import FakeModelRunner, fake_logprobs, generate
from tests.fakes.scheduling import BLOCK_SIZE, make_scheduler, must_plan, step
from workers.engine.events import ChunkComputed, PromptComputed, PromptScored, TokensSampled
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceSpec
from workers.engine.step import ScheduledSequence, SequenceId

ZERO = SequenceId(0)
ONE = SequenceId(1)


def spec(number: int, prompt, mode=SequenceMode.GENERATE, **sampling) -> SequenceSpec:
    return SequenceSpec(
        sequence_id=SequenceId(number),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=4, **sampling),
        mode=mode,
    )


def seen_of(entry: ScheduledSequence) -> dict[int, int] | None:
    if entry.seen is None:
        return None
    return dict(zip(array("q", entry.seen.ids), array("q", entry.seen.output_counts), strict=True))


def run(scheduler: Scheduler) -> list:
    """All events of what the fake model makes of the scheduler's plans."""
    runner, events = FakeModelRunner(block_size=BLOCK_SIZE), []
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(runner.execute(plan))
        events += scheduler.take_events()
    return events


def test_counts_come_with_the_rows_that_sample_and_have_penalties():
    scheduler = make_scheduler()
    scheduler.submit(spec(0, [3, 3, 5, 6, 7], presence_penalty=0.5), 0.0)
    scheduler.submit(spec(1, [3, 3]), 0.0)

    seen = [
        {entry.sequence_id: seen_of(entry) for entry in step(scheduler, {0: 5, 1: 5}).sequences}
        for _ in range(4)
    ]

    prompt = {3: 0, 5: 0, 6: 0, 7: 0}
    assert [each.get(ZERO) for each in seen] == [
        None,  # its first chunk samples nothing
        prompt,
        {**prompt, 5: 1},
        {**prompt, 5: 2},
    ]
    assert {each.get(ONE) for each in seen} == {None}


def test_a_published_sequence_is_counted_as_if_it_had_been_computed_here():
    here, there = make_scheduler(), make_scheduler()
    here.submit(spec(0, [3, 4, 5], frequency_penalty=1.0), 0.0)
    step(here, {0: 4})
    there.submit(spec(0, [3, 4, 5], SequenceMode.AWAIT_KV, frequency_penalty=1.0), 0.0)
    there.publish(ZERO, 4)

    for _ in range(3):
        plans = step(here, {0: 9}), step(there, {0: 9})
        (mine,), (theirs,) = (plan.sequences for plan in plans)
        assert seen_of(mine) == seen_of(theirs)
        assert seen_of(mine) is not None


def test_each_prompt_token_but_the_first_is_scored_once_whatever_the_chunks():
    prompt = tuple(range(40, 51))
    for chunk in (1, 3, 8):
        scheduler = make_scheduler(prefill_chunk_tokens=chunk)
        scheduler.submit(spec(0, prompt, prompt_logprobs=2), 0.0)

        events = run(scheduler)

        scored = [each for e in events if isinstance(e, PromptScored) for each in e.logprobs]
        assert scored == [fake_logprobs(prompt[:i], prompt[i], 2) for i in range(1, len(prompt))]
        first = next(i for i, e in enumerate(events) if isinstance(e, TokensSampled))
        assert not any(isinstance(event, PromptScored) for event in events[first:])


def test_a_prompt_kept_for_a_reader_is_scored_with_its_chunks():
    scheduler = make_scheduler(prefill_chunk_tokens=4)
    prompt = tuple(range(6))
    asked = {"prompt_logprobs": 1, "logprobs": 3}
    scheduler.submit(spec(0, prompt, SequenceMode.PREFILL_ONLY, **asked), 0.0)

    events = run(scheduler)

    chunks = [event.prompt_logprobs for event in events if isinstance(event, ChunkComputed)]
    expected = tuple(fake_logprobs(prompt[:i], prompt[i], 1) for i in range(1, 6))
    assert chunks == [expected[:4], expected[4:]]
    (first,) = generate(prompt, 1)
    assert events[-1] == PromptComputed(
        sequence_id=ZERO, first_token=first, logprobs=fake_logprobs(prompt, first, 3)
    )


def test_output_tokens_come_with_what_was_asked_of_them():
    scheduler = make_scheduler()
    scheduler.submit(spec(0, [1, 2], logprobs=0), 0.0)
    scheduler.submit(spec(1, [1, 2]), 0.0)

    events = [event for event in run(scheduler) if isinstance(event, TokensSampled)]

    tokens = generate([1, 2], 4)
    expected = [(fake_logprobs([1, 2, *tokens[:i]], tokens[i], 0),) for i in range(4)]
    assert [event.logprobs for event in events if event.sequence_id == ZERO] == expected
    assert {event.logprobs for event in events if event.sequence_id == ONE} == {()}


def test_a_published_first_token_keeps_its_log_probability():
    scheduler = make_scheduler()
    scheduler.submit(spec(0, [1, 2], SequenceMode.AWAIT_KV, logprobs=1), 0.0)
    first = TokenLogprobs(logprob=-1.5, rank=3, top=((8, -0.5),))

    scheduler.publish(ZERO, 7, first)

    assert scheduler.take_events()[-1] == TokensSampled(
        sequence_id=ZERO, token_ids=(7,), logprobs=(first,)
    )


def test_scored_prompts_share_their_own_budget_and_others_are_not_held_up():
    scheduler = make_scheduler(
        step_tokens=16, prefill_chunk_tokens=8, max_sequences=4, scored_tokens=5
    )
    for number, asked in enumerate([0, 0, None]):
        scheduler.submit(spec(number, range(4), prompt_logprobs=asked), 0.0)

    first, third = must_plan(scheduler).sequences

    assert [len(entry.token_ids) for entry in (first, third)] == [4, 4]
    assert first.scoring is not None
    assert first.scoring.token_ids == (1, 2, 3)
    assert third.scoring is None


def test_a_scored_prompt_is_cut_at_the_same_places_whatever_streams_beside_it():
    """Chunks of another size round otherwise."""

    def chunks(num_streams: int, **limits: object) -> list[int]:
        scheduler = make_scheduler(
            step_tokens=16, prefill_chunk_tokens=8, max_sequences=8, scored_tokens=6, **limits
        )
        for number in range(1, num_streams + 1):
            scheduler.submit(spec(number, range(2)), 0.0)
        if num_streams:
            scheduler.pace.observe(step(scheduler), 1000.0)
        scheduler.submit(spec(0, range(16), prompt_logprobs=0), 0.0)
        lengths = []
        for _ in range(3):
            plan = step(scheduler)
            lengths += [len(each.token_ids) for each in plan.sequences if each.sequence_id == 0]
        return lengths

    assert chunks(0) == chunks(4) == chunks(4, gap_target_s=0.1) == [6, 6, 4]


def test_a_scored_prompt_waits_while_others_use_up_the_budget():
    scheduler = make_scheduler(step_tokens=16, prefill_chunk_tokens=8, scored_tokens=4)
    for number, asked in enumerate([0, 0, None]):
        scheduler.submit(spec(number, range(4), prompt_logprobs=asked), 0.0)

    assert [entry.sequence_id for entry in step(scheduler).sequences] == [0, 2]


def test_a_scored_prompt_waits_rather_than_make_a_step_too_long_and_nobody_passes_it():
    scheduler = make_scheduler(
        max_model_len=128,
        num_blocks=64,
        step_tokens=128,
        prefill_chunk_tokens=128,
        scored_tokens=16,
        step_target_s=0.1,  # by which 64 tokens fit, as long as nobody knows more
    )
    scheduler.submit(spec(0, range(50)), 0.0)
    scheduler.submit(spec(1, range(20), prompt_logprobs=0), 0.0)
    scheduler.submit(spec(2, range(4)), 0.0)

    first, second = step(scheduler), step(scheduler)

    assert [(entry.sequence_id, len(entry.token_ids)) for entry in first.sequences] == [(0, 50)]
    assert [(entry.sequence_id, len(entry.token_ids)) for entry in second.sequences] == [
        (0, 1),
        (1, 16),
        (2, 4),
    ]


def test_a_budget_for_scored_prompts_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        SchedulerConfig(
            max_model_len=8,
            max_sequences=1,
            step_tokens=4,
            prefill_chunk_tokens=4,
            queue_limit=0,
            scored_tokens=0,
        )
