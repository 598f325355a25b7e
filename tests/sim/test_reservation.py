"""Both schedulers of the reservation benchmark serve the same requests to the end."""

from __future__ import annotations

import random

import pytest

from tests.sim.on_demand import OnDemandScheduler
from tests.sim.one_worker import Outcome, Request, StepCost, simulate
from workers.engine.block_pool import BlockPool
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig

WINDOW = 256
COST = StepCost(
    base_s=0.01, row_s=0.001, context_s=1e-6, prompt_token_s=0.0005, prompt_context_s=1e-8
)
CONFIG = SchedulerConfig(
    max_model_len=WINDOW,
    max_sequences=16,
    step_tokens=80,
    prefill_chunk_tokens=64,
    queue_limit=1000,
)


def small_pool() -> BlockPool:
    return BlockPool(num_blocks=40, block_size=8, max_model_len=WINDOW)


def load(seed: int, *, gap_s: float, count: int = 300) -> list[Request]:
    """Requests of any size up to the window; some ask for far more output than they get."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for _ in range(count):
        now += rng.expovariate(1 / gap_s)
        prompt = rng.randint(1, 150)
        output = rng.randint(1, 60)
        requests.append(
            Request(
                at_s=now,
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=min(WINDOW - prompt, output * rng.choice((1, 2, 10))),
            )
        )
    return requests


def assert_served(outcome: Outcome, requests: list[Request]) -> None:
    assert [track.num_tokens for track in outcome.tracks] == [r.output_tokens for r in requests]
    assert all(track.ttft_s > 0 for track in outcome.tracks)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_finish_the_same_requests_and_leave_every_block_free(seed):
    requests = load(seed, gap_s=0.05)
    on_demand = OnDemandScheduler(small_pool(), CONFIG)
    reserving = Scheduler(small_pool(), CONFIG)
    for scheduler in (on_demand, reserving):
        outcome = simulate(scheduler, requests, COST, check_every=1)
        assert_served(outcome, requests)
        scheduler.check_invariants()
        assert scheduler.num_live == 0
        assert scheduler.pool.num_available == scheduler.pool.num_blocks
    print(f"seed={seed} preemptions={on_demand.preemptions}")
    assert on_demand.preemptions > 10, "the load was too light to prove anything"


def test_where_blocks_are_plenty_both_take_the_same_time():
    """They differ in when blocks are taken, and in nothing else."""
    requests = load(4, gap_s=0.2)
    durations = []
    for make in (OnDemandScheduler, Scheduler):
        pool = BlockPool(num_blocks=4000, block_size=8, max_model_len=WINDOW)
        outcome = simulate(make(pool, CONFIG), requests, COST)
        durations.append([(track.first_s, track.last_s) for track in outcome.tracks])
    assert durations[0] == durations[1]


def test_a_preempted_sequence_computes_its_prompt_and_its_output_again():
    """Two sequences that fit together at first, and not at their end."""
    pool = BlockPool(num_blocks=6, block_size=8, max_model_len=48)
    config = SchedulerConfig(
        max_model_len=48, max_sequences=4, step_tokens=64, prefill_chunk_tokens=64, queue_limit=9
    )
    requests = [
        Request(at_s=0.0, prompt_tokens=20, output_tokens=25, max_tokens=25) for _ in range(2)
    ]
    scheduler = OnDemandScheduler(pool, config)
    outcome = simulate(scheduler, requests, COST, check_every=1)

    assert_served(outcome, requests)
    assert scheduler.preemptions == 1
    assert scheduler.recomputed_tokens == 24  # three full blocks each, and the older one grows
    older, younger = outcome.tracks
    assert older.last_s < younger.last_s
    assert younger.longest_gap_s > 10 * older.longest_gap_s


def test_a_reserving_scheduler_never_pauses_a_running_sequence():
    requests = load(5, gap_s=0.02)
    outcome = simulate(Scheduler(small_pool(), CONFIG), requests, COST)

    longest_step_s = COST.base_s + 16 * (COST.row_s + WINDOW * COST.context_s) + 80 * 0.0006
    assert max(track.longest_gap_s for track in outcome.tracks) <= longest_step_s
