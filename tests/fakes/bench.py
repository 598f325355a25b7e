"""Stand-ins for a benchmark's clock, its machine, and the streams of the servers it measures."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import httpx

from deployments.bench.cpu import CpuReading
from deployments.bench.session import PointResult, VersusResult

T = TypeVar("T")
_IDLE_TURNS = 50
"""Turns of the event loop after which everyone who can go on has done so."""


class VirtualClock:
    """`Clock` whose time passes only while everyone waits for a moment of it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """See `Clock`."""
        return self._now

    async def sleep_until(self, moment_s: float) -> None:
        """See `Clock`."""
        if moment_s <= self._now:
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment_s, next(self._order), future))
        await future

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """What `main` returns; moves time on to the next sleeper whenever nothing else happens."""
        task = asyncio.ensure_future(main)
        while not task.done():
            for _ in range(_IDLE_TURNS):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self._now, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)
        return task.result()


class ScriptedStream(httpx.AsyncByteStream):
    """A response's body: bytes at moments of a clock, counted from when it is read."""

    def __init__(self, clock: VirtualClock, parts: Sequence[tuple[float, bytes]]) -> None:
        self._clock = clock
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        began_s = self._clock.now()
        for after_s, content in self._parts:
            await self._clock.sleep_until(began_s + after_s)
            yield content


def event(body: object) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of a completion."""
    return event({"choices": [{"text": text, "finish_reason": finish_reason}]})


def usage_event(prompt: int, output: int, cached: int | None = None) -> bytes:
    """The chunk that counts."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, **details}
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


class IdleMachine:
    """`CpuSource` of a machine on which nobody does anything."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._readings = 0

    def read(self) -> CpuReading:
        """See `CpuSource`."""
        # Readings of real machines are never at the same moment either.
        self._readings += 1
        at_s = self._clock.now() + self._readings * 1e-6
        return CpuReading(at_s=at_s, busy_s=0.0, own_s=0.0, servers_s={}, all_servers_s=0.0)


class RecordingObserver:
    """`Observer` that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int | None]] = []
        self.num_ended_requests = 0
        self.num_ended_loads = 0
        self.points: list[PointResult] = []
        self.versus: list[VersusResult] = []
        self.labels_skipped: list[str] = []

    def begin(self, label: str, total: int | None) -> None:
        """See `Observer`."""
        self.begun.append((label, total))

    def advance(self) -> None:
        """See `Observer`."""
        self.num_ended_requests += 1

    def end(self) -> None:
        """See `Observer`."""
        self.num_ended_loads += 1

    def point_done(self, point: PointResult) -> None:
        """See `Observer`."""
        self.points.append(point)

    def versus_done(self, result: VersusResult) -> None:
        """See `Observer`."""
        self.versus.append(result)

    def skipped(self, label: str) -> None:
        """See `Observer`."""
        self.labels_skipped.append(label)
