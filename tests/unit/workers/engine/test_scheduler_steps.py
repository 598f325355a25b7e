"""What a step computes, and what its tokens mean."""

from dataclasses import replace

import pytest

from tests.fakes.scheduling import (
    free_blocks,
    kinds,
    make_scheduler,
    make_spec,
    must_plan,
    rows,
    run_dry,
    step,
)
from workers.engine.events import (
    SequenceFinished,
    TokensSampled,
)
from workers.engine.sequence import SequenceMode
from workers.engine.step import SequenceId
from workers.engine.token_counts import TokenCounts
from workers.messages import FinishReason

ZERO = SequenceId(0)
ONE = SequenceId(1)
TWO = SequenceId(2)
AWAIT_KV = SequenceMode.AWAIT_KV


def test_nothing_to_compute_is_no_plan():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV), 0.0)
    assert scheduler.plan(0.0) is None


def test_prompt_is_cut_into_chunks():
    scheduler = make_scheduler(prefill_chunk_tokens=4)
    scheduler.submit(make_spec(prompt=10, max_tokens=1), 0.0)
    assert [rows(scheduler) for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)]]


def test_only_the_chunk_that_ends_the_prompt_samples():
    scheduler = make_scheduler(prefill_chunk_tokens=4)
    scheduler.submit(make_spec(prompt=8), 0.0)
    sampling = [step(scheduler).sequences[0].sampling for _ in range(2)]
    assert sampling == [None, make_spec(prompt=8).sampling]


def test_decodes_come_first_and_prompts_share_the_rest_in_order():
    scheduler = make_scheduler(step_tokens=8, prefill_chunk_tokens=4)
    scheduler.submit(make_spec(0, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1, prompt=9), 0.0)
    scheduler.submit(make_spec(2, prompt=9), 0.0)
    scheduler.publish(ZERO, 100)
    assert rows(scheduler) == [(0, 4, 1), (1, 0, 4), (2, 0, 3)]


def test_step_without_budget_left_makes_the_youngest_prompt_wait():
    scheduler = make_scheduler(step_tokens=4, prefill_chunk_tokens=4)
    scheduler.submit(make_spec(0, prompt=9), 0.0)
    scheduler.submit(make_spec(1, prompt=9), 0.0)
    assert rows(scheduler) == [(0, 0, 4)]


def test_decode_row_carries_the_last_token_its_position_and_the_count_of_output():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4), 0.0)
    step(scheduler, {0: 55})
    (entry,) = must_plan(scheduler).sequences
    assert (entry.token_ids, entry.start, entry.end) == ((55,), 4, 5)
    assert entry.num_output_tokens == 1


def test_prefill_of_a_fallback_goes_before_younger_prompts():
    scheduler = make_scheduler(step_tokens=4, prefill_chunk_tokens=4)
    scheduler.submit(make_spec(0, prompt=6, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(1, prompt=6), 0.0)
    scheduler.prefill_here(ZERO)
    assert rows(scheduler) == [(0, 0, 4)]


def test_plan_refuses_while_a_step_is_in_flight():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(), 0.0)
    must_plan(scheduler)
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.plan(0.0)


def test_sequence_ends_at_max_tokens_and_gives_everything_back():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4, max_tokens=2), 0.0)
    step(scheduler, {0: 11})
    step(scheduler, {0: 12})
    assert scheduler.take_events()[1:] == [
        TokensSampled(sequence_id=ZERO, token_ids=(11,)),
        TokensSampled(sequence_id=ZERO, token_ids=(12,)),
        SequenceFinished(
            sequence_id=ZERO, reason=FinishReason.LENGTH, prompt_tokens=4, completion_tokens=2
        ),
    ]
    assert free_blocks(scheduler) == 16


def test_stop_token_is_counted_but_not_passed_on():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4, max_tokens=9, stop=frozenset({7})), 0.0)
    step(scheduler, {0: 11})
    step(scheduler, {0: 7})
    assert scheduler.take_events()[1:] == [
        TokensSampled(sequence_id=ZERO, token_ids=(11,)),
        SequenceFinished(
            sequence_id=ZERO,
            reason=FinishReason.STOP,
            prompt_tokens=4,
            completion_tokens=2,
            stop_token_id=7,
        ),
    ]


def test_stop_token_at_max_tokens_is_a_stop():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4, max_tokens=1, stop=frozenset({7})), 0.0)
    step(scheduler, {0: 7})
    end = scheduler.take_events()[-1]
    assert isinstance(end, SequenceFinished)
    assert end.reason is FinishReason.STOP


def test_blocks_turn_used_as_tokens_are_computed():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4, max_tokens=4), 0.0)
    step(scheduler)
    assert scheduler.pool.counts().used == 1
    step(scheduler)  # the first output token's KV opens the second block
    assert scheduler.pool.counts().used == 2


def test_published_first_token_that_stops_ends_the_sequence():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV, stop=frozenset({7})), 0.0)
    scheduler.publish(ZERO, 7)
    assert kinds(scheduler.take_events()) == ["Admitted", "SequenceFinished"]
    assert free_blocks(scheduler) == 16


def test_published_first_token_that_is_the_last_ends_the_sequence():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(mode=AWAIT_KV, max_tokens=1), 0.0)
    scheduler.publish(ZERO, 11)
    assert kinds(scheduler.take_events()) == ["Admitted", "TokensSampled", "SequenceFinished"]


def test_totals_count_what_was_done():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(0, prompt=6, max_tokens=2), 0.0)
    scheduler.submit(make_spec(1, prompt=6, max_tokens=2, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(2, prompt=6), 0.0)
    scheduler.cancel(TWO)
    scheduler.publish(ONE, 5)
    run_dry(scheduler)
    totals = scheduler.totals
    assert (totals.steps, totals.prompt_tokens, totals.output_tokens) == (3, 6, 4)
    assert (totals.finished, totals.aborted, totals.failed) == (2, 1, 0)


def test_resumed_output_counts_as_output_everywhere():
    """Reserved, sampled and reported as if this worker had made it."""
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=8, max_tokens=5, num_resumed=3), 0.0)
    assert free_blocks(scheduler) == 16 - 3  # 5 prompt and 5 output tokens
    assert [len(step(scheduler).sequences[0].token_ids) for _ in range(2)] == [4, 4]
    (entry,) = step(scheduler).sequences
    assert entry.num_output_tokens == 4
    (finished,) = [e for e in scheduler.take_events() if isinstance(e, SequenceFinished)]
    assert (finished.prompt_tokens, finished.completion_tokens) == (5, 5)
    assert finished.reason is FinishReason.LENGTH


def test_first_token_after_a_resume_knows_how_much_output_there_was():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=4, max_tokens=5, num_resumed=3), 0.0)
    (entry,) = must_plan(scheduler).sequences
    assert entry.num_output_tokens == 3


@pytest.mark.parametrize("num_resumed", [-1, 5])
def test_resuming_with_nothing_left_to_sample_is_refused(num_resumed):
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="to go on from"):
        scheduler.submit(make_spec(prompt=8, max_tokens=5, num_resumed=num_resumed), 0.0)


def test_resumed_output_is_output_to_penalties_too():
    scheduler = make_scheduler()
    spec = make_spec(prompt=4, max_tokens=5, num_resumed=1)
    penalized = replace(spec.sampling, frequency_penalty=1.0)
    scheduler.submit(replace(spec, sampling=penalized), 0.0)
    (entry,) = must_plan(scheduler).sequences
    expected = TokenCounts((0, 1, 2))
    expected.add(3)
    assert entry.seen == expected.seen()
