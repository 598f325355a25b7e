"""One worker in discrete events: requests with known lengths, a scheduler, and what a step costs.

Nothing here knows how the scheduler decides. Time is the simulation's own, so a run is the same
each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from workers.engine.block_pool import BlockPool
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import SequenceSpec
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult

__all__ = ["Outcome", "Request", "SimulatedScheduler", "StepCost", "Track", "simulate"]

_STOP = 1
_WORD = 2


class SimulatedScheduler(Protocol):
    """What a simulation asks of a scheduler."""

    @property
    def pool(self) -> BlockPool:
        """The blocks that it hands out."""

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""

    def submit(self, spec: SequenceSpec, now: float) -> None:
        """Take a sequence."""

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""

    def commit(self, result: StepResult) -> None:
        """Take in what the step gave."""

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client sends, and how long the answer will be, which the scheduler does not know."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    """What the client asks for at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one step, by what is in it."""

    base_s: float
    """Every step: reading the weights, launching."""
    row_s: float
    """Each decoding sequence."""
    context_s: float
    """Each token that a decoding sequence attends to."""
    prompt_token_s: float
    """Each prompt token."""
    prompt_context_s: float
    """Each token that a prompt token attends to."""

    def of(self, plan: StepPlan) -> float:
        """Seconds of a whole step."""
        return self.base_s + sum(map(self._of_rows, plan.sequences))

    def _of_rows(self, entry: ScheduledSequence) -> float:
        rows = len(entry.token_ids)
        if rows == 1:
            return self.row_s + self.context_s * entry.end
        attended = rows * (entry.start + entry.end) / 2
        return self.prompt_token_s * rows + self.prompt_context_s * attended

    def alone_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """Seconds to the first token of a request that has the worker to itself."""
        steps = -(-prompt_tokens // chunk_tokens)
        attended = prompt_tokens * prompt_tokens / 2
        return (
            steps * self.base_s
            + self.prompt_token_s * prompt_tokens
            + self.prompt_context_s * attended
        )


@dataclass(slots=True, kw_only=True)
class Track:
    """What one request got."""

    request: Request
    num_tokens: int = 0
    first_s: float = 0.0
    """When its first token was sampled; the next two likewise."""
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From arrival."""
        return self.first_s - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """0 for an answer of one token."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)

    def take(self, now: float) -> bool:
        """One more token; whether it was the last."""
        if self.num_tokens == 0:
            self.first_s = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        self.last_s = now
        self.num_tokens += 1
        return self.num_tokens == self.request.output_tokens


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A whole run."""

    tracks: list[Track] = field(default_factory=list)
    duration_s: float = 0.0
    """From the first arrival to the last token."""
    steps: int = 0
    held: float = 0.0
    """Share of the pool that is taken, on average over time."""
    filled: float = 0.0
    """Share of the pool that holds KV."""
    batch: float = 0.0
    """Sequences in a step, on average over time."""


def simulate(
    scheduler: SimulatedScheduler,
    requests: Sequence[Request],
    cost: StepCost,
    *,
    check_every: int = 0,
) -> Outcome:
    """Serve all requests, which come in order of arrival; check_every counts steps, 0 is never."""
    outcome = Outcome(tracks=[Track(request=request) for request in requests])
    now, arrived = requests[0].at_s, 0
    while True:
        arrived = _submit(scheduler, requests, arrived, until=now)
        plan = scheduler.plan(now)
        if plan is None:
            assert scheduler.num_live == 0, "a sequence waits though nothing runs"
            if arrived == len(requests):
                break
            now = requests[arrived].at_s
            continue
        seconds = cost.of(plan)
        _observe(outcome, scheduler.pool, plan, seconds)
        now += seconds
        arrived = _submit(scheduler, requests, arrived, until=now)
        scheduler.commit(_sampled(plan, outcome.tracks, now))
        if check_every and outcome.steps % check_every == 0:
            scheduler.check_invariants()
    busy_s = now - requests[0].at_s
    outcome.duration_s = busy_s
    for name in ("held", "filled", "batch"):
        setattr(outcome, name, getattr(outcome, name) / busy_s)
    return outcome


def _submit(
    scheduler: SimulatedScheduler, requests: Sequence[Request], arrived: int, *, until: float
) -> int:
    """Hand over who has come by then; returns how many have come at all."""
    while arrived < len(requests) and requests[arrived].at_s <= until:
        request = requests[arrived]
        # The first token is the request's own: no two prompts share a block.
        prompt = (arrived + 100, *(0,) * (request.prompt_tokens - 1))
        scheduler.submit(
            SequenceSpec(
                sequence_id=SequenceId(arrived),
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    max_tokens=request.max_tokens, stop_token_ids=frozenset({_STOP})
                ),
            ),
            request.at_s,
        )
        arrived += 1
    return arrived


def _sampled(plan: StepPlan, tracks: Sequence[Track], now: float) -> StepResult:
    sampling: Iterable[ScheduledSequence] = (e for e in plan.sequences if e.sampling is not None)
    tokens = {
        entry.sequence_id: _STOP if tracks[entry.sequence_id].take(now) else _WORD
        for entry in sampling
    }
    return StepResult(step_id=plan.step_id, token_ids=tokens)


def _observe(outcome: Outcome, pool: BlockPool, plan: StepPlan, seconds: float) -> None:
    counts = pool.counts()
    outcome.steps += 1
    outcome.held += seconds * (counts.total - counts.free - counts.cached) / counts.total
    outcome.filled += seconds * counts.used / counts.total
    outcome.batch += seconds * len(plan.sequences)
