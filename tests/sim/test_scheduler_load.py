"""A worker under overload, thousands of requests: no starvation, no leak, everybody ends.

Discrete events on a fake clock, seeded. Lengths follow a public trace of chat traffic (log-normal
with its medians, 1020 prompt and 129 output tokens, and its spread), scaled down by 8 as the
window is; steps cost what a small model costs, a base and a price per row.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable
from functools import partial

import pytest

from workers.engine.block_pool import BlockPool
from workers.engine.events import (
    TERMINAL_EVENTS,
    Admitted,
    Event,
    PromptComputed,
    SequenceAborted,
    SequenceFailed,
)
from workers.engine.prefix_cache import PrefixScope
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.errors import (
    DeadlineExceededError,
    QueueFullError,
    StepFailedError,
    WorkerError,
)

WINDOW = 512
AGING_S = 10.0
REQUESTS_PER_S = 40.0
"""About twice what the worker can do, so that queue and pool are always full."""
TENANTS = 12
"""Each asks about one text, begun alike; more of them than the pool can keep."""
SCOPE = PrefixScope(fingerprint="a model in a layout", block_size=16)
CHECK_EVERY = 40
"""Steps between two full self-checks."""


class Load:
    """Draws requests as clients make them."""

    def __init__(
        self, rng: random.Random, *, modes: tuple[SequenceMode, ...], priorities: tuple[int, ...]
    ) -> None:
        self._rng = rng
        self._modes = modes
        self._priorities = priorities

    def gap_s(self) -> float:
        return self._rng.expovariate(REQUESTS_PER_S)

    def tokens(self, median: float, sigma: float, longest: int) -> int:
        return max(1, min(longest, round(self._rng.lognormvariate(math.log(median), sigma))))

    def spec(self, number: int, now: float) -> SequenceSpec:
        prompt = self.tokens(1020 / 8, 0.99, WINDOW - 64)
        is_hurried = self._rng.random() < 0.1
        return SequenceSpec(
            sequence_id=SequenceId(number),
            prompt_token_ids=tuple(range(prompt)),
            sampling=SamplingParams(
                max_tokens=min(WINDOW - prompt, self.tokens(129 / 8, 0.86, 128)),
                stop_token_ids=frozenset({0}),
            ),
            mode=self._rng.choice(self._modes),
            priority=self._rng.choice(self._priorities),
            deadline=now + self._rng.uniform(0.5, 20) if is_hurried else None,
            cache_salt=f"tenant {number % TENANTS}",
        )


class Simulation:
    """One worker, its clients and its peers."""

    def __init__(
        self,
        seed: int,
        *,
        modes: tuple[SequenceMode, ...],
        priorities: tuple[int, ...],
        scope: PrefixScope | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.load = Load(self.rng, modes=modes, priorities=priorities)
        pool = BlockPool(num_blocks=128, block_size=16, max_model_len=WINDOW)
        config = SchedulerConfig(
            max_model_len=WINDOW,
            max_sequences=16,
            step_tokens=128,
            prefill_chunk_tokens=64,
            queue_limit=32,
            aging_s=AGING_S,
        )
        self.scheduler = Scheduler(pool, config, scope)
        self.now = 0.0
        self.specs: dict[SequenceId, SequenceSpec] = {}
        self.arrived: dict[SequenceId, float] = {}
        self.waited: dict[SequenceId, float] = {}
        self.ends: dict[SequenceId, Event] = {}
        self.live: set[SequenceId] = set()
        self.refused = 0
        self.in_flight: StepPlan | None = None
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._ordinals = itertools.count()

    def at(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._ordinals), action))

    def run(self, num_requests: int) -> None:
        """Arrivals first to last, then until nothing is left to happen."""
        self._arrive(0, num_requests)
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
            self._react()

    # -- what happens ---------------------------------------------------------------------------

    def _arrive(self, number: int, num_requests: int) -> None:
        if number + 1 < num_requests:
            self.at(self.load.gap_s(), lambda: self._arrive(number + 1, num_requests))
        spec = self.load.spec(number, self.now)
        self.arrived[spec.sequence_id] = self.now
        try:
            self.scheduler.submit(spec, self.now)
        except QueueFullError:
            self.refused += 1
            return
        self.specs[spec.sequence_id] = spec
        self.live.add(spec.sequence_id)
        if spec.deadline is not None:  # the engine's timer
            self.at(spec.deadline - self.now, lambda: self.scheduler.expire(self.now))
        if self.rng.random() < 0.1:
            patience_s = self.rng.expovariate(0.3)
            self.at(patience_s, lambda: self.scheduler.cancel(spec.sequence_id))

    def _end_step(self) -> None:
        plan, self.in_flight = self.in_flight, None
        assert plan is not None
        if self.rng.random() < 0.002:
            self.scheduler.fail_step(StepFailedError("broken"))
            return
        sampled = {
            entry.sequence_id: self.rng.randrange(60)  # token 0 stops: about one in 60
            for entry in plan.sequences
            if entry.sampling is not None
        }
        self.scheduler.commit(StepResult(step_id=plan.step_id, token_ids=sampled))
        if plan.step_id % CHECK_EVERY == 0:
            self.scheduler.check_invariants()

    def _transferred(self, sequence_id: SequenceId) -> None:
        """A transfer arrived, or broke and is fenced a little later."""
        if self.rng.random() < 0.9 and self.scheduler.publish(sequence_id, 1):
            return
        self.scheduler.quarantine(sequence_id)
        self.at(self.rng.uniform(0, 0.5), lambda: self._fenced(sequence_id))

    def _fenced(self, sequence_id: SequenceId) -> None:
        if self.scheduler.fence(sequence_id):
            self.scheduler.prefill_here(sequence_id)

    # -- what follows ---------------------------------------------------------------------------

    def _react(self) -> None:
        self._take_events()
        if self.in_flight is None:
            self._begin_step()
            self._take_events()

    def _begin_step(self) -> None:
        self.in_flight = self.scheduler.plan(self.now)
        if self.in_flight is None:
            return
        planned = {entry.sequence_id for entry in self.in_flight.sequences}
        decoding = {
            number
            for number in self.live
            if self.scheduler.status_of(number) is SequenceStatus.DECODING
        }
        assert decoding <= planned, "a decoding sequence was left out of a step"
        assert self.in_flight.num_tokens <= self.scheduler.config.step_tokens
        self.at(0.004 + 0.0002 * self.in_flight.num_tokens, self._end_step)

    def _take_events(self) -> None:
        events = self.scheduler.take_events()
        for event in events:
            if isinstance(event, Admitted):
                self._admitted(event)
            elif isinstance(event, PromptComputed):
                held_s = self.rng.uniform(0.01, 1)
                self.at(held_s, partial(self.scheduler.release, event.sequence_id))
            elif isinstance(event, TERMINAL_EVENTS):
                assert event.sequence_id not in self.ends, "INV-ONE-END"
                self.ends[event.sequence_id] = event
                self.live.remove(event.sequence_id)
        self._nobody_was_overtaken([e.sequence_id for e in events if isinstance(e, Admitted)])

    def _admitted(self, event: Admitted) -> None:
        sequence_id = event.sequence_id
        self.waited[sequence_id] = self.now - self.arrived[sequence_id]
        if self.specs[sequence_id].mode is SequenceMode.AWAIT_KV:
            self.at(self.rng.uniform(0.02, 0.5), lambda: self._transferred(sequence_id))

    def _nobody_was_overtaken(self, admitted: list[SequenceId]) -> None:
        if not admitted:
            return
        latest = max(self._rank(number) for number in admitted)
        for number in self.live:
            if self.scheduler.status_of(number) is SequenceStatus.WAITING:
                assert latest < self._rank(number), f"sequence {number} was overtaken"

    def _rank(self, number: SequenceId) -> tuple[float, SequenceId]:
        return self.arrived[number] + self.specs[number].priority * AGING_S, number


MODES = {
    "colocated": (SequenceMode.GENERATE,),
    "prefill": (SequenceMode.PREFILL_ONLY,),
    "decode": (SequenceMode.AWAIT_KV, SequenceMode.AWAIT_KV, SequenceMode.GENERATE),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("role", MODES)
def test_worker_under_overload_serves_everybody_it_took(role, seed):
    simulation = Simulation(seed, modes=MODES[role], priorities=(0, 0, 0, 0, 1, -1))
    simulation.run(2000)
    print(f"seed={seed} role={role} now={simulation.now:.0f} refused={simulation.refused}")

    scheduler = simulation.scheduler
    scheduler.check_invariants()
    assert simulation.refused > 100, "the load was too light to prove anything"
    assert simulation.ends.keys() == simulation.specs.keys()
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    unexpected = [
        event
        for event in simulation.ends.values()
        if isinstance(event, SequenceFailed) and not _is_expected(event.error)
    ]
    assert unexpected == []
    assert any(isinstance(event, SequenceAborted) for event in simulation.ends.values())


@pytest.mark.parametrize("role", MODES)
def test_worker_that_finds_much_under_overload_loses_nothing(role):
    """Hits, evictions and refusals at once; the same rules hold as without a prefix cache."""
    simulation = Simulation(5, modes=MODES[role], priorities=(0, 0, 0, 1, -1), scope=SCOPE)
    simulation.run(2000)
    scheduler, totals = simulation.scheduler, simulation.scheduler.totals
    print(f"seed=5 role={role} refused={simulation.refused} {totals}")

    scheduler.check_invariants()
    assert simulation.ends.keys() == simulation.specs.keys()
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    assert simulation.refused > 0, "the load was too light to prove anything"
    assert totals.hit_tokens > totals.queried_tokens / 20, "there was next to nothing to find"
    assert totals.evicted_blocks > scheduler.pool.num_blocks


def _is_expected(error: WorkerError) -> bool:
    return isinstance(error, DeadlineExceededError | StepFailedError)


@pytest.mark.parametrize("seed", [3, 4])
def test_large_requests_wait_no_longer_than_small_ones_under_overload(seed):
    """What is freed accrues to the head, however much it needs: the queue is blind to size."""
    simulation = Simulation(seed, modes=(SequenceMode.GENERATE,), priorities=(0,))
    simulation.run(3000)
    by_size = sorted(
        simulation.waited, key=lambda number: simulation.specs[number].num_reserved_tokens
    )
    quarter = len(by_size) // 4
    small = statistics.mean(simulation.waited[number] for number in by_size[:quarter])
    large = statistics.mean(simulation.waited[number] for number in by_size[-quarter:])
    print(f"seed={seed} n={len(by_size)} mean wait: small {small:.2f} s, large {large:.2f} s")
    assert small > 0.5, "the load was too light to prove anything"
    assert large < 1.15 * small
