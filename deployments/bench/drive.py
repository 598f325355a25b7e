"""Sends the requests of a load when it is their turn, and of an interference run. Owns no clock."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from deployments.bench.measure import Sample
from deployments.bench.workload import Load, PlannedRequest

__all__ = ["Clock", "Send", "SystemClock", "drive", "drive_steadily"]


class Clock(Protocol):
    """The time of all stamps, and waiting for a moment of it."""

    def now(self) -> float:
        """Seconds from any fixed moment; never less than before."""

    async def sleep_until(self, moment_s: float) -> None:
        """Return at the moment, or at once where it has passed."""


class Send(Protocol):
    """Sends one request, due at a moment of the clock, and returns at its end; never raises."""

    def __call__(self, request: PlannedRequest, due_s: float) -> Awaitable[Sample]: ...


class SystemClock:
    """`Clock` of this machine."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def now(self) -> float:
        """See `Clock`."""
        return self._now()

    async def sleep_until(self, moment_s: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(max(0.0, moment_s - self._now()))


async def drive(load: Load, send: Send, clock: Clock, *, deadline_s: float) -> list[Sample]:
    """Send a load's requests; returns what was seen of each, by index.

    From the deadline on nothing more is sent; those on their way are waited for.
    """
    if load.concurrency is None:
        samples = await _drive_open(load, send, clock, deadline_s)
    else:
        samples = await _drive_closed(load, load.concurrency, send, clock, deadline_s)
    return sorted(samples, key=lambda sample: sample.index)


async def drive_steadily(
    send: Send, clock: Clock, requests: Iterator[PlannedRequest], *, streams: int, until_s: float
) -> list[Sample]:
    """Keep `streams` requests in flight until a moment; each that has begun comes to its end."""

    async def stream(samples: list[Sample]) -> None:
        while (now := clock.now()) < until_s:
            samples.append(await send(next(requests), now))

    lists: list[list[Sample]] = [[] for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        for samples in lists:
            group.create_task(stream(samples))
    return list(itertools.chain.from_iterable(lists))


async def _drive_open(load: Load, send: Send, clock: Clock, deadline_s: float) -> list[Sample]:
    """Each when it is due, whatever became of those before it."""
    started_s = clock.now()
    tasks: list[asyncio.Task[Sample]] = []

    async def one(request: PlannedRequest, due_s: float) -> Sample:
        return await send(request, due_s)

    async with asyncio.TaskGroup() as group:
        for request in load.requests:
            due_s = started_s + request.due_s
            if due_s >= deadline_s:
                break
            await clock.sleep_until(due_s)
            tasks.append(group.create_task(one(request, due_s)))
    return [task.result() for task in tasks]


async def _drive_closed(
    load: Load, concurrency: int, send: Send, clock: Clock, deadline_s: float
) -> list[Sample]:
    """The next whenever one has ended."""
    waiting = iter(load.requests)
    samples: list[Sample] = []

    async def place() -> None:
        for request in waiting:
            if (now := clock.now()) >= deadline_s:
                return
            samples.append(await send(request, now))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(place())
    return samples
