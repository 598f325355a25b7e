"""Front's end of the channel to one decode worker: any number of requests on one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable

from deployments.channel.choice import Candidate
from deployments.channel.frames import WINDOW_EVENTS, Cancel, Credit, Events, Open
from deployments.channel.stream import ChannelLostError, FrameStream
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    GenerateRequest,
    WorkerEvent,
    WorkerLoad,
)

__all__ = ["WorkerChannel"]

_CREDIT_EVENTS = WINDOW_EVENTS // 2
"""Given back at once: often enough that a reader which keeps up never waits for it."""


class WorkerChannel:
    """A connected worker; `run` reads, and everything else may be called while it does."""

    def __init__(
        self,
        stream: FrameStream,
        *,
        worker: str,
        silence_s: float,
        clock: Callable[[], float],
        on_load: Callable[[], None],
    ) -> None:
        """Take over a connection; `on_load` is called whenever the worker has told its load."""
        self._stream = stream
        self._worker = worker
        self._silence_s = silence_s
        self._clock = clock
        self._on_load = on_load
        self._calls: dict[int, _Call] = {}
        self._next_call = itertools.count()
        self._load: WorkerLoad | None = None
        self._heard_at = clock()
        self._is_lost = False

    @property
    def candidate(self) -> Candidate | None:
        """The worker for `choose`; None until it has told its load."""
        if self._load is None or self._is_lost:
            return None
        return Candidate(
            worker=self._worker,
            outstanding=len(self._calls),
            load=self._load,
            is_silent=self._clock() - self._heard_at > self._silence_s,
        )

    async def run(self) -> None:
        """Read until the connection ends: every request that is open has lost its worker then.

        Raises `ChannelLostError`.
        """
        try:
            while True:
                for frame in await self._stream.receive():
                    if not isinstance(frame, Events):
                        raise ChannelLostError(f"a worker sent {type(frame).__name__}")
                    self._take(frame)
        finally:
            self._is_lost = True
            self._stream.abort()
            for call in self._calls.values():
                call.lose()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """See `WorkerPool.generate`; a connection that is lost is a `Failed` with WORKER_LOST."""
        call = _Call(request)
        call_id = next(self._next_call)
        self._calls[call_id] = call
        if self._is_lost:
            call.lose()
        has_ended = False
        try:
            self._stream.send(Open(call=call_id, request=request))
            while not has_ended:
                event = await call.next()
                if (events := call.due_credit()) and not isinstance(event, Finished | Failed):
                    self._stream.send(Credit(call=call_id, events=events))
                has_ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            del self._calls[call_id]
            if not has_ended:
                self._stream.send(Cancel(call=call_id))

    def _take(self, frame: Events) -> None:
        self._heard_at = self._clock()
        for call_id, event in frame.events:
            call = self._calls.get(call_id)  # of one that was cancelled, more may come
            if call is not None:
                call.put(event)
        if frame.load is not None:
            self._load = frame.load
            self._on_load()


class _Call:
    """One request on the channel: what has come for it and is not yet read."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._events: deque[WorkerEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._num_unread_credit = 0

    def put(self, event: WorkerEvent) -> None:
        """An event has come; raises `ChannelLostError` if the worker sends more than it may."""
        if len(self._events) >= WINDOW_EVENTS:
            raise ChannelLostError("the worker sends more than was read")
        self._add(event)

    def lose(self) -> None:
        """The connection has ended; what had come before is read first."""
        self._add(
            Failed(
                attempt=self._request.attempt,
                code=FailureCode.WORKER_LOST,
                message="the decode worker was lost",
            )
        )

    async def next(self) -> WorkerEvent:
        """The next event, for one reader."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._num_unread_credit += 1
        return self._events.popleft()

    def due_credit(self) -> int:
        """How many events to give credit for now; 0 for as long as that is not worth a frame."""
        if self._num_unread_credit < _CREDIT_EVENTS:
            return 0
        events, self._num_unread_credit = self._num_unread_credit, 0
        return events

    def _add(self, event: WorkerEvent) -> None:
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
