"""Prefill and decode workers in discrete events: real schedulers and the real placement rule.

Each worker is a machine of its own. A hand-off is what it adds after the last chunk, the blocks
before having moved meanwhile; nothing is lost on the way. Time is the simulation's own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.geometry import ceil_div
from tests.sim.one_worker import Request, StepCost, Track
from workers.engine.block_pool import BlockPool
from workers.engine.events import Admitted, PromptComputed
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.messages import PrefillLoad
from workers.placement import PlacementConfig, PlacementRule, PrefillOutlook, Prompt

__all__ = ["HandoffCost", "Split", "SplitConfig"]

_STOP = 1
_WORD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCost:
    """Seconds that a hand-off adds to a prompt's computation."""

    fixed_s: float
    block_s: float
    """Each block of the last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """The machines, and the rule by which prompts find theirs."""

    num_decode: int
    num_prefill: int
    """0: the decode workers compute every prompt."""
    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    placement: PlacementConfig
    decode_cost: StepCost
    prefill_cost: StepCost
    handoff: HandoffCost


@dataclass(slots=True, kw_only=True)
class _Machine:
    """A scheduler, and the step that it is in."""

    name: str
    scheduler: Scheduler
    cost: StepCost
    is_busy: bool = False
    outlook: PrefillOutlook | None = None
    rule: PlacementRule | None = None


@dataclass(slots=True, kw_only=True)
class Split:
    """One run: `serve` the requests, then look at what came of it."""

    config: SplitConfig
    tracks: list[Track] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    """The reason for each decision that the rule took, with its place before it."""
    check_every: int = 0
    """Steps between two checks of all invariants; 0 is none."""
    decode: list[_Machine] = field(init=False)
    prefill: list[_Machine] = field(init=False)
    steps: int = 0
    duration_s: float = 0.0
    _now: float = 0.0
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """Set the machines up."""
        config = self.config
        self.decode = [
            self._machine(f"decode-{i}", config.decode_cost) for i in range(config.num_decode)
        ]
        self.prefill = [
            self._machine(f"prefill-{i}", config.prefill_cost) for i in range(config.num_prefill)
        ]
        for machine in self.decode:
            machine.outlook = PrefillOutlook(block_size=config.block_size)
            machine.rule = PlacementRule(config.placement, machine.outlook)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve all requests to their ends."""
        self.tracks = [Track(request=request) for request in requests]
        for number, request in enumerate(requests):
            self._at(request.at_s, lambda number=number: self._arrive(number))
        while self._later:
            self._now, _, happen = heapq.heappop(self._later)
            happen()
            for machine in self.machines:
                self._begin_step(machine)
        self.duration_s = self._now - requests[0].at_s

    @property
    def machines(self) -> list[_Machine]:
        """All of them, decode first."""
        return [*self.decode, *self.prefill]

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._order), happen))

    def _machine(self, name: str, cost: StepCost) -> _Machine:
        config = self.config
        pool = BlockPool(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_model_len=config.scheduler.max_model_len,
        )
        return _Machine(name=name, scheduler=Scheduler(pool, config.scheduler), cost=cost)

    # -- a request ------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        machine = min(self.decode, key=lambda one: one.scheduler.num_live)
        length = self.tracks[number].request.prompt_tokens
        is_short = length <= self.config.placement.local_prefill_tokens
        is_here = not self.prefill or is_short
        mode = SequenceMode.GENERATE if is_here else SequenceMode.AWAIT_KV
        machine.scheduler.submit(self._spec(number, mode), self._now)
        self._react(machine)

    def _spec(self, number: int, mode: SequenceMode) -> SequenceSpec:
        request = self.tracks[number].request
        return SequenceSpec(
            sequence_id=SequenceId(number),
            # The first token is the request's own: no two prompts share a block.
            prompt_token_ids=(number + 100, *(0,) * (request.prompt_tokens - 1)),
            sampling=SamplingParams(
                max_tokens=request.max_tokens, stop_token_ids=frozenset({_STOP})
            ),
            mode=mode,
        )

    def _react(self, machine: _Machine) -> None:
        """What follows from what a decode worker's scheduler says."""
        for event in machine.scheduler.take_events():
            is_waiting = isinstance(event, Admitted) and self._awaits(machine, event.sequence_id)
            if is_waiting:
                self._place(machine, event.sequence_id)

    def _awaits(self, machine: _Machine, number: SequenceId) -> bool:
        return machine.scheduler.status_of(number) is SequenceStatus.AWAITING_KV

    def _place(self, machine: _Machine, number: SequenceId) -> None:
        assert machine.rule is not None
        decision = machine.rule.decide(self._prompt(number), machine.scheduler.load(), self._now)
        place = "here" if decision.is_here else "there"
        self.placed.append(f"{place} {decision.reason.value}")
        if decision.is_here:
            machine.scheduler.prefill_here(number)
        else:
            self._hand_over(machine, number)

    def _prompt(self, number: int) -> Prompt:
        length = self.tracks[number].request.prompt_tokens
        return Prompt(num_tokens=length, num_missing=length)

    # -- a hand-off -----------------------------------------------------------------------------

    def _hand_over(self, machine: _Machine, number: SequenceId) -> None:
        helper = min(self.prefill, key=lambda one: one.scheduler.num_live)
        helper.scheduler.submit(self._spec(number, SequenceMode.PREFILL_ONLY), self._now)
        self._hear(machine, helper)

    def _hear(self, machine: _Machine, helper: _Machine) -> None:
        assert machine.outlook is not None
        load = helper.scheduler.load()
        said = PrefillLoad(queued_tokens=load.queued_tokens, prompt_token_s=load.prompt_token_s)
        machine.outlook.heard(helper.name, said, self._now)

    def _computed(self, helper: _Machine, number: SequenceId) -> None:
        """The last chunk is granted: its blocks move."""
        length = self.tracks[number].request.prompt_tokens
        chunk = min(length, self.config.scheduler.prefill_chunk_tokens)
        blocks = ceil_div(chunk, self.config.block_size)
        added_s = self.config.handoff.fixed_s + blocks * self.config.handoff.block_s
        self._at(self._now + added_s, lambda: self._landed(helper, number, added_s))

    def _landed(self, helper: _Machine, number: SequenceId, added_s: float) -> None:
        (machine,) = (one for one in self.decode if self._awaits(one, number))
        assert machine.outlook is not None
        machine.outlook.landed(self._prompt(number), num_found=0, added_s=added_s)
        helper.scheduler.release(number)
        self._hear(machine, helper)
        machine.scheduler.publish(number, self._token(number))
        self._react(machine)

    # -- a step ---------------------------------------------------------------------------------

    def _begin_step(self, machine: _Machine) -> None:
        if machine.is_busy:
            return
        plan = machine.scheduler.plan(self._now)
        if plan is not None:
            machine.is_busy = True
            seconds = machine.cost.of(plan)
            self._at(self._now + seconds, lambda: self._end_step(machine, plan, seconds))

    def _end_step(self, machine: _Machine, plan: StepPlan, seconds: float) -> None:
        machine.is_busy = False
        is_helper = machine.rule is None
        tokens = {
            entry.sequence_id: _WORD if is_helper else self._token(entry.sequence_id)
            for entry in plan.sequences
            if entry.sampling is not None
        }
        machine.scheduler.commit(StepResult(step_id=plan.step_id, token_ids=tokens))
        machine.scheduler.pace.observe(plan, seconds)
        self.steps += 1
        if self.check_every and self.steps % self.check_every == 0:
            for one in self.machines:
                one.scheduler.check_invariants()
        if not is_helper:
            self._react(machine)
            return
        for event in machine.scheduler.take_events():
            if isinstance(event, PromptComputed):
                self._computed(machine, event.sequence_id)

    def _token(self, number: int) -> int:
        """One more token reaches the reader."""
        return _STOP if self.tracks[number].take(self._now) else _WORD
