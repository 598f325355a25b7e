"""What deciding costs: one plan and one commit, without a model.

    python -m tests.bench.bench_scheduler

Prints microseconds per call and the ratio to the cheapest step there is, one decoding sequence.
The goal is 200 us for plan and for commit at 64 sequences: under 2 % of a 10 ms step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.block_pool import BlockPool
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceSpec
from workers.engine.step import SequenceId, StepPlan, StepResult

STEPS = 2000
PROMPT = tuple(range(512))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds of each call."""

    plan: list[float]
    commit: list[float]
    check: float


def make_scheduler(*, num_waiting: int) -> Scheduler:
    pool = BlockPool(num_blocks=64 * 256, block_size=16, max_model_len=4096)
    config = SchedulerConfig(
        max_model_len=4096,
        max_sequences=64,
        step_tokens=512,
        prefill_chunk_tokens=256,
        queue_limit=max(num_waiting, 1),
    )
    return Scheduler(pool, config)


def submit(scheduler: Scheduler, number: int, mode: SequenceMode) -> None:
    spec = SequenceSpec(
        sequence_id=SequenceId(number),
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=STEPS + 500, stop_token_ids=frozenset({1, 2})),
        mode=mode,
        deadline=1e9 + number,
    )
    scheduler.submit(spec, 0.0)


def sampled(plan: StepPlan) -> StepResult:
    token_ids = {entry.sequence_id: 7 for entry in plan.sequences if entry.sampling is not None}
    return StepResult(step_id=plan.step_id, token_ids=token_ids)


def timed_us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def measure(*, num_decoding: int, num_waiting: int) -> Cost:
    """Decode num_decoding sequences while num_waiting stand in the queue."""
    scheduler = make_scheduler(num_waiting=num_waiting)
    for number in range(num_decoding):
        submit(scheduler, number, SequenceMode.AWAIT_KV)
        scheduler.publish(SequenceId(number), 7)
    for number in range(num_decoding, num_decoding + num_waiting):
        submit(scheduler, number, SequenceMode.GENERATE)
    scheduler.take_events()
    plan_us, commit_us = [], []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        plan_us.append((time.perf_counter_ns() - start) / 1000)
        assert plan is not None
        assert len(plan.sequences) >= num_decoding
        result = sampled(plan)
        commit_us.append(timed_us(lambda result=result: scheduler.commit(result)))  # type: ignore[misc]
        scheduler.take_events()
    check = statistics.median(timed_us(scheduler.check_invariants) for _ in range(20))
    return Cost(plan=plan_us, commit=commit_us, check=check)


def main() -> None:
    print(f"n={STEPS} steps; microseconds: median (p99); ratio to 1 decoding sequence")
    base = measure(num_decoding=1, num_waiting=0)
    for num_decoding, num_waiting in ((1, 0), (16, 0), (64, 0), (64, 256)):
        cost = measure(num_decoding=num_decoding, num_waiting=num_waiting)
        parts = []
        for name in ("plan", "commit"):
            calls: list[float] = getattr(cost, name)
            median = statistics.median(calls)
            ratio = median / statistics.median(getattr(base, name))
            p99 = statistics.quantiles(calls, n=100)[98]
            parts.append(f"{name} {median:6.1f} ({p99:6.1f}) x{ratio:4.1f}")
        label = f"decoding={num_decoding:3d} waiting={num_waiting:3d}"
        print(f"{label}  {'  '.join(parts)}  check_invariants {cost.check:.0f}")


if __name__ == "__main__":
    main()
