"""The placement rule in whole pools: every prompt is computed once, every answer ends.

No time is asserted; `tests.bench.bench_placement` prints what the rules gain.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.sim.one_worker import Request, StepCost
from tests.sim.split import HandoffCost, Split, SplitConfig
from workers.engine.scheduler_config import SchedulerConfig
from workers.placement import PlacementConfig

WINDOW = 512
FLOOR = 16
COST = StepCost(
    base_s=0.01, row_s=0.001, context_s=1e-6, prompt_token_s=0.0005, prompt_context_s=1e-8
)
CONFIG = SplitConfig(
    num_decode=2,
    num_prefill=1,
    scheduler=SchedulerConfig(
        max_model_len=WINDOW,
        max_sequences=16,
        step_tokens=80,
        prefill_chunk_tokens=64,
        queue_limit=1000,
        gap_target_s=0.03,
    ),
    num_blocks=160,
    block_size=8,
    placement=PlacementConfig(local_prefill_tokens=FLOOR, is_by_cost=True),
    decode_cost=COST,
    prefill_cost=COST,
    handoff=HandoffCost(fixed_s=0.005, block_s=0.0002),
)


def load(seed: int, *, gap_s: float = 0.05, count: int = 150) -> list[Request]:
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for _ in range(count):
        now += rng.expovariate(1 / gap_s)
        output = rng.randint(1, 60)
        requests.append(
            Request(
                at_s=now,
                prompt_tokens=rng.randint(1, 400),
                output_tokens=output,
                max_tokens=output + rng.choice((0, 20)),
            )
        )
    return requests


def run(config: SplitConfig, requests: list[Request]) -> Split:
    """Serve everything, and check what must hold whatever the rule."""
    split = Split(config=config, check_every=50)
    split.serve(requests)
    assert [track.num_tokens for track in split.tracks] == [one.output_tokens for one in requests]
    for machine in split.machines:
        machine.scheduler.check_invariants()
        assert machine.scheduler.num_live == 0
        assert machine.scheduler.pool.num_available == machine.scheduler.pool.num_blocks
    assert sum(map(computed, split.machines)) == sum(one.prompt_tokens for one in requests)
    return split


def computed(machine) -> int:
    return machine.scheduler.totals.prompt_tokens


def by_rule(config: SplitConfig, *, is_by_cost: bool) -> SplitConfig:
    return replace(config, placement=replace(config.placement, is_by_cost=is_by_cost))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_by_cost_every_prompt_is_computed_once_and_both_pools_are_used(seed):
    split = run(CONFIG, load(seed))
    counts = Counter(split.placed)
    print(f"seed={seed} {dict(counts)}")
    assert set(counts) == {"there unmeasured", "there cheaper", "here cheaper"}
    assert all(computed(machine) > 0 for machine in split.machines)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_by_the_floor_alone_prefill_computes_every_longer_prompt(seed):
    requests = load(seed)
    split = run(by_rule(CONFIG, is_by_cost=False), requests)
    longer = [one.prompt_tokens for one in requests if one.prompt_tokens > FLOOR]
    assert split.placed == ["there setting"] * len(longer)
    assert sum(map(computed, split.prefill)) == sum(longer)


def test_without_a_prefill_pool_nothing_is_placed():
    split = run(replace(CONFIG, num_decode=3, num_prefill=0), load(1))
    assert split.placed == []


def test_the_same_requests_are_placed_the_same_way_again():
    first, second = (run(CONFIG, load(4)) for _ in range(2))
    assert first.placed == second.placed
    assert [track.last_s for track in first.tracks] == [track.last_s for track in second.tracks]


def test_a_prefill_pool_that_is_slow_gets_fewer_prompts():
    slow = replace(CONFIG, prefill_cost=replace(COST, base_s=0.1, prompt_token_s=0.005))
    there = [
        sum(one.startswith("there") for one in run(config, load(5)).placed)
        for config in (CONFIG, slow)
    ]
    assert there[1] < there[0] / 2


def test_an_idle_worker_keeps_its_prompts_but_for_what_measures_the_pool():
    """One request at a time, of machines of one speed: moving it could save nobody anything."""
    requests = [replace(one, at_s=5.0 * i) for i, one in enumerate(load(6, count=40))]
    split = run(replace(CONFIG, num_decode=1), requests)
    there = [one for one in split.placed if one.startswith("there")]
    assert set(there) == {"there unmeasured"}
    assert len(there) < len(split.placed) / 4
