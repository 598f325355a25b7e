"""Runs a plan on one server, or on two in turns, and gathers what came of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deployments.bench.client import TIMEOUT, StreamingClient
from deployments.bench.cpu import CpuReading, CpuUse, cpu_between
from deployments.bench.drive import Clock, drive, drive_steadily
from deployments.bench.errors import NothingMeasuredError
from deployments.bench.interference import (
    Interference,
    InterferenceSummary,
    Phase,
    measure_phase,
)
from deployments.bench.measure import Failure, Sample, Summary, summarize
from deployments.bench.plan import BenchOptions, Plan, Point
from deployments.bench.versus import Comparison, Side, compare, turns
from deployments.bench.workload import Load, PlannedRequest

__all__ = ["Observer", "PointResult", "Report", "ServerInfo", "Session", "VersusResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is measured."""

    name: Side
    address: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """One load on one server, once."""

    server: Side
    label: str
    run: str
    """Which sending it was; part of the prompts' seed."""
    summary: Summary | InterferenceSummary
    cpu: CpuUse
    samples: tuple[Sample, ...] = ()
    num_cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersusResult:
    """One load on both servers, in turns."""

    label: str
    rounds: tuple[tuple[PointResult, PointResult], ...]
    """A's and B's, whoever went first."""
    comparisons: tuple[Comparison, ...]
    num_rounds_cut: int
    """Rounds that the time did not suffice for."""


@dataclass(slots=True, kw_only=True)
class Report:
    """All that was measured, as it comes."""

    options: Mapping[str, Any]
    seed: int
    servers: tuple[ServerInfo, ...]
    host: Mapping[str, Any]
    points: list[PointResult] = field(default_factory=list)
    versus: list[VersusResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Labels of what the time did not suffice for."""


class Observer(Protocol):
    """Is told how far a session is."""

    def begin(self, label: str, total: int | None) -> None:
        """A load begins, of so many requests where that is known."""

    def advance(self) -> None:
        """One more of its requests has ended."""

    def end(self) -> None:
        """The load has ended."""

    def point_done(self, point: PointResult) -> None:
        """One load was measured on the only server."""

    def versus_done(self, result: VersusResult) -> None:
        """One load was measured on both."""

    def skipped(self, label: str) -> None:
        """The time did not suffice for a load."""


class CpuSource(Protocol):
    """Reads CPU times; see `cpu.CpuWatch`."""

    def read(self) -> CpuReading:
        """The times so far."""


class Session:
    """Measures one point after the other; nothing goes on past options.max_seconds."""

    def __init__(
        self,
        options: BenchOptions,
        plan: Plan,
        clients: Mapping[Side, StreamingClient],
        *,
        clock: Clock,
        cpu: CpuSource,
        observer: Observer,
    ) -> None:
        self._options = options
        self._plan = plan
        self._clients = clients
        self._clock = clock
        self._cpu = cpu
        self._observer = observer
        self._deadline_s = clock.now() + options.max_seconds

    async def run(self, report: Report) -> None:
        """Warm up, then measure every point into the report.

        NothingMeasuredError where a warm-up request fails, or no request finished at all.
        """
        for side in self._clients:
            await self._warm_up(side)
        for number, point in enumerate(self._plan.points):
            if not self._has_time_for(point):
                report.skipped.append(point.label)
                self._observer.skipped(point.label)
            elif len(self._clients) == 1:
                result = await self._measure("A", point, f"point {number}")
                report.points.append(result)
                self._observer.point_done(result)
            else:
                await self._measure_both(point, number, report)
        _check_anything_finished(report)

    async def _warm_up(self, side: Side) -> None:
        for number in range(self._options.warmup):
            request = PlannedRequest(
                # From a list's end: a prompt that the server has seen would measure its cache.
                index=-1 - number,
                prompt_tokens=self._plan.warm_up.prompt_tokens,
                output_tokens=self._plan.warm_up.output_tokens,
            )
            sample = await self._send(side, request, f"warm-up {side}", self._clock.now())
            if sample.failure is not None:
                raise NothingMeasuredError(
                    f"A warm-up request to server {side} failed ({sample.failure.kind}): "
                    f"{sample.failure.message}"
                )

    async def _measure_both(self, point: Point, number: int, report: Report) -> None:
        rounds: list[tuple[PointResult, PointResult]] = []
        for round_number, order in turns(self._options.rounds):
            found: dict[Side, PointResult] = {}
            for side in order:
                if self._has_time_for(point):
                    run = f"point {number} round {round_number} {side}"
                    found[side] = await self._measure(side, point, run)
            # A round that the deadline cut says nothing about the two.
            if len(found) == len(order) and self._clock.now() < self._deadline_s:
                rounds.append((found["A"], found["B"]))
        comparisons = compare([(a.summary.figures(), b.summary.figures()) for a, b in rounds])
        result = VersusResult(
            label=point.label,
            rounds=tuple(rounds),
            comparisons=tuple(comparisons),
            num_rounds_cut=self._options.rounds - len(rounds),
        )
        report.versus.append(result)
        self._observer.versus_done(result)

    async def _measure(self, side: Side, point: Point, run: str) -> PointResult:
        before = self._cpu.read()
        samples: list[Sample] = []
        summary: Summary | InterferenceSummary
        if isinstance(point, Load):
            samples, summary = await self._measure_load(side, point, run)
        else:
            summary = await self._measure_interference(side, point, run)
        return PointResult(
            server=side,
            label=point.label,
            run=run,
            summary=summary,
            cpu=cpu_between(before, self._cpu.read()),
            samples=tuple(samples),
            num_cut=point.num_cut if isinstance(point, Load) else 0,
        )

    async def _measure_load(self, side: Side, load: Load, run: str) -> tuple[list[Sample], Summary]:
        self._observer.begin(f"{side} {load.label}", len(load.requests))
        started_s = self._clock.now()

        def send(request: PlannedRequest, due_s: float) -> Awaitable[Sample]:
            return self._send(side, request, run, due_s)

        samples = await drive(load, send, self._clock, deadline_s=self._deadline_s)
        wall_s = self._clock.now() - started_s
        self._observer.end()
        return samples, summarize(samples, wall_s=wall_s, targets=self._options.targets)

    async def _measure_interference(
        self, side: Side, plan: Interference, run: str
    ) -> InterferenceSummary:
        self._observer.begin(f"{side} {plan.label}", None)
        alone = await self._measure_phase(side, plan, f"{run} alone", is_disturbed=False)
        beside = await self._measure_phase(side, plan, f"{run} beside", is_disturbed=True)
        self._observer.end()
        return InterferenceSummary(alone=alone, beside=beside)

    async def _measure_phase(
        self, side: Side, plan: Interference, run: str, *, is_disturbed: bool
    ) -> Phase:
        started_s = self._clock.now()

        def steady(request: PlannedRequest, due_s: float) -> Awaitable[Sample]:
            return self._send(side, request, f"{run} steady", due_s)

        def long(request: PlannedRequest, due_s: float) -> Awaitable[Sample]:
            return self._send(side, request, f"{run} long", due_s)

        async with asyncio.TaskGroup() as group:
            streams = group.create_task(
                drive_steadily(
                    steady,
                    self._clock,
                    plan.steady_requests(),
                    streams=plan.streams,
                    until_s=started_s + plan.duration_s,
                )
            )
            longs = (
                group.create_task(
                    drive(plan.long_prompts(), long, self._clock, deadline_s=self._deadline_s)
                )
                if is_disturbed
                else None
            )
        return measure_phase(
            streams.result(),
            longs.result() if longs else [],
            started_s=started_s,
            duration_s=plan.duration_s,
        )

    async def _send(self, side: Side, request: PlannedRequest, run: str, due_s: float) -> Sample:
        prompt = self._plan.prompts.prompt(request, run)
        left_s = max(0.0, self._deadline_s - self._clock.now())
        sample = await self._clients[side].ask(
            prompt,
            request.output_tokens,
            index=request.index,
            due_s=due_s,
            timeout_s=min(self._options.timeout_s, left_s),
        )
        self._observer.advance()
        if left_s < self._options.timeout_s:
            return _without_blame(sample)
        return sample

    def _has_time_for(self, point: Point) -> bool:
        needed_s = 2 * point.duration_s if isinstance(point, Interference) else 0.0
        return self._clock.now() + needed_s < self._deadline_s


def _without_blame(sample: Sample) -> Sample:
    """What our own deadline ended is no failure of the server, which had less than its time."""
    if sample.failure is None or sample.failure.kind != TIMEOUT:
        return sample
    failure = Failure(kind="unfinished", message="--max-seconds was up before it ended")
    return replace(sample, failure=failure)


def _check_anything_finished(report: Report) -> None:
    measured = [*report.points, *itertools.chain(*(r for v in report.versus for r in v.rounds))]
    if not any(point.summary.figures().keys() & _PROOFS for point in measured):
        raise NothingMeasuredError("No request finished.")


_PROOFS = frozenset({"ttft_p50_s", "alone_itl_p50_s"})
"""Figures that exist only where something was answered."""
