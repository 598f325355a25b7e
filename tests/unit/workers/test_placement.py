"""Where a prompt is computed, by measured costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.pace import Load
from workers.messages import PrefillLoad
from workers.placement import (
    PLACES,
    Decision,
    PlacementConfig,
    PlacementRule,
    PrefillOutlook,
    Prompt,
    Reason,
)

BLOCK_SIZE = 16
PROMPT = Prompt(num_tokens=1000, num_missing=1000)
IDLE = Load(queued_tokens=0, prompt_token_s=0.002, num_streams=0, streams_s=0.0, step_tokens=256)
FREE = PrefillLoad(queued_tokens=0, prompt_token_s=0.002)
HERE = Decision(is_here=True, reason=Reason.CHEAPER)
THERE = Decision(is_here=False, reason=Reason.CHEAPER)
UNMEASURED = Decision(is_here=False, reason=Reason.UNMEASURED)


def outlook_of(*, added_s: float = 0.05, num_found: int = 0, **loads: PrefillLoad):
    """A pool whose workers were heard of at 0, after one hand-off that took so long."""
    outlook = PrefillOutlook(block_size=BLOCK_SIZE)
    outlook.landed(PROMPT, num_found=num_found, added_s=added_s)
    for worker_id, load in loads.items():
        outlook.heard(worker_id, load, 0.0)
    return outlook


def decide(
    outlook: PrefillOutlook,
    here: Load = IDLE,
    prompt: Prompt = PROMPT,
    *,
    is_by_cost: bool = True,
    now: float = 0.0,
) -> Decision:
    config = PlacementConfig(local_prefill_tokens=128, is_by_cost=is_by_cost)
    return PlacementRule(config, outlook).decide(prompt, here, now)


def test_with_little_missing_a_prompt_stays_whatever_it_costs():
    busy = replace(IDLE, queued_tokens=10**6)
    short = Prompt(num_tokens=1000, num_missing=128)
    for is_by_cost in (True, False):
        decision = decide(outlook_of(p=FREE), busy, short, is_by_cost=is_by_cost)
        assert decision == Decision(is_here=True, reason=Reason.SHORT)


def test_without_costs_everything_longer_goes():
    decision = decide(outlook_of(p=FREE), is_by_cost=False)
    assert decision == Decision(is_here=False, reason=Reason.SETTING)


def test_idle_workers_of_one_speed_leave_the_prompt_where_it_is():
    assert decide(outlook_of(p=FREE)) == HERE


def test_streams_that_would_wait_send_it_away():
    """Each of two streams would wait as long as the prompt takes."""
    assert decide(outlook_of(p=FREE), replace(IDLE, num_streams=2, streams_s=0.04)) == THERE


def test_a_queue_on_prefill_keeps_it_here_until_it_is_longer_than_the_harm_done():
    streaming = replace(IDLE, num_streams=1)
    assert decide(outlook_of(p=replace(FREE, queued_tokens=900)), streaming) == THERE
    assert decide(outlook_of(p=replace(FREE, queued_tokens=1100)), streaming) == HERE


def test_steps_that_streams_share_make_it_slow_here():
    """With a gap target, a prompt goes in many small pieces, each beside a step of the streams."""
    streaming = replace(IDLE, num_streams=1, streams_s=0.04)
    queue = outlook_of(p=replace(FREE, queued_tokens=1500))
    assert decide(queue, streaming) == HERE
    assert decide(queue, replace(streaming, step_tokens=16)) == THERE


def test_prompts_that_are_queued_here_count():
    assert decide(outlook_of(p=FREE), replace(IDLE, queued_tokens=100)) == THERE


def test_faster_prefill_workers_get_it():
    assert decide(outlook_of(p=replace(FREE, prompt_token_s=0.001))) == THERE


def test_what_decode_has_of_the_prompt_counts_for_staying():
    fast = outlook_of(p=replace(FREE, prompt_token_s=0.001))
    assert decide(fast, prompt=replace(PROMPT, num_missing=400)) == HERE


def test_what_prefill_tends_to_find_counts_for_going():
    assert decide(outlook_of(p=FREE, num_found=500)) == THERE


def test_slow_hand_offs_keep_it_here():
    fast = replace(FREE, prompt_token_s=0.001)
    assert decide(outlook_of(p=fast, added_s=0.9)) == THERE
    assert decide(outlook_of(p=fast, added_s=1.1)) == HERE


def test_worker_that_computed_nothing_yet_is_taken_to_be_as_fast_as_prefill():
    unknown = replace(IDLE, prompt_token_s=None)
    assert decide(outlook_of(p=replace(FREE, queued_tokens=1000)), unknown) == HERE
    assert decide(outlook_of(p=FREE), replace(unknown, queued_tokens=1000)) == THERE


@pytest.mark.parametrize(
    "outlook",
    [
        PrefillOutlook(block_size=BLOCK_SIZE),
        outlook_of(),
        outlook_of(p=replace(FREE, prompt_token_s=None)),
    ],
    ids=["no hand-off", "no word", "no measurement"],
)
def test_an_unknown_pool_is_asked(outlook):
    assert decide(outlook) == UNMEASURED


def test_old_news_is_none():
    outlook = outlook_of(p=FREE)
    assert decide(outlook, now=60.0) == HERE
    assert decide(outlook, now=60.5) == UNMEASURED


def test_a_lost_worker_counts_no_more():
    outlook = outlook_of(p=FREE)
    outlook.lost("p")
    outlook.lost("p")
    assert decide(outlook) == UNMEASURED


def test_a_queue_that_nobody_adds_to_is_worked_off():
    outlook = outlook_of(p=PrefillLoad(queued_tokens=2000, prompt_token_s=0.001))
    assert decide(outlook, now=0.5) == HERE
    assert decide(outlook, now=1.5) == THERE


def test_the_least_busy_prefill_worker_counts():
    slow = replace(FREE, prompt_token_s=0.001, queued_tokens=5000)
    assert decide(outlook_of(a=slow)) == HERE
    assert decide(outlook_of(a=slow, b=replace(slow, queued_tokens=0))) == THERE


def test_prompts_on_their_way_count_as_queued_there():
    outlook = outlook_of(p=replace(FREE, prompt_token_s=0.001))
    outlook.asked(1500)
    assert decide(outlook) == HERE
    outlook.answered(1500)
    assert decide(outlook) == THERE


def test_every_reason_leads_somewhere():
    assert {reason for reasons in PLACES.values() for reason in reasons} == set(Reason)


loads = st.builds(
    Load,
    queued_tokens=st.integers(0, 5000),
    prompt_token_s=st.floats(1e-4, 0.1),
    num_streams=st.integers(0, 64),
    streams_s=st.floats(0.0, 1.0),
    step_tokens=st.integers(1, 512),
)


@given(here=loads, more=st.integers(1, 5000), queue=st.integers(0, 5000))
def test_more_work_here_never_brings_a_prompt_back(here, more, queue):
    outlook = outlook_of(p=replace(FREE, queued_tokens=queue))
    if not decide(outlook, here).is_here:
        assert not decide(outlook, replace(here, queued_tokens=here.queued_tokens + more)).is_here
        assert not decide(outlook, replace(here, num_streams=here.num_streams + more)).is_here
