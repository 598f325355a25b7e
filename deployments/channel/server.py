"""The decode worker's end of the token channel: takes Fronts, runs their requests.

All events of one engine step leave in one write for each Front. A Front that goes, or breaks the
protocol, takes its own requests with it; one that reads slowly keeps back its own, request by
request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from deployments.channel.address import ChannelAddress
from deployments.channel.frames import (
    MAX_EVENTS,
    WINDOW_EVENTS,
    Cancel,
    Credit,
    Events,
    Open,
    pieces,
)
from deployments.channel.stream import ChannelLostError, ChannelTimings, FrameStream, accept
from kv_transfer.authentication import Purpose, Responder, Secret
from kv_transfer.doorkeeper import Doorkeeper
from kv_transfer.transfer_thread import run_beside
from workers.messages import (
    Failed,
    FailureCode,
    GenerateRequest,
    Heartbeat,
    WorkerEvent,
    WorkerLoad,
)

__all__ = ["ChannelServer", "ChannelService"]

logger = logging.getLogger(__name__)

_BACKLOG = 128


class ChannelService(Protocol):
    """The worker behind the channel."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """See `DecodeWorker.generate`."""

    def load(self) -> WorkerLoad:
        """How busy it is; cheap."""


class ChannelServer:
    """Listens for Fronts and serves each on its own connection; for one event loop."""

    def __init__(
        self,
        *,
        service: ChannelService,
        worker: str,
        secret: Secret,
        timings: ChannelTimings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker` is the name that Fronts look for, and give in `GenerateRequest.avoid`."""
        self._service = service
        self._worker = worker
        self._secret = secret
        self._timings = timings
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._is_leaving = False
        self._door: Doorkeeper[_Connection] = Doorkeeper(on_stranger=self._note_stranger)
        self._num_strangers = 0

    @property
    def num_strangers(self) -> int:
        """Connections so far that had not proved to know the secret when they ended."""
        return self._num_strangers

    async def start(self, host: str, port: int) -> ChannelAddress:
        """Listen there, and nowhere else; port 0 is any."""
        self._server = await asyncio.start_server(self._take, host, port, backlog=_BACKLOG)
        listening, *_ = self._server.sockets
        host, port, *_ = listening.getsockname()
        return ChannelAddress(worker=self._worker, host=host, port=port)

    def leave(self) -> None:
        """Tell every Front that nothing new is for this worker; what runs goes on."""
        self._is_leaving = True
        for connection in self._door.connections:
            connection.report()

    async def close(self) -> None:
        """Take nobody more, let last words leave for a moment, cancel what runs even then.

        Safe to repeat.
        """
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(each.finish() for each in self._door.connections))
        tasks = self._door.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by asyncio for each connection; not a coroutine, so that none is left unowned."""
        if not self._door.makes_room():
            logger.warning("channel refused connections=%d", len(self._door))
            writer.transport.abort()
            return
        connection = _Connection(
            self._worker,
            self._service,
            self._load,
            self._timings,
            self._clock,
            self._note_stranger,
        )
        responder = Responder(secret=self._secret, purpose=Purpose.TOKEN_CHANNEL, me=self._worker)
        task = asyncio.create_task(connection.run(reader, writer, responder))
        self._door.let_in(task, connection)
        task.add_done_callback(lambda task: self._ended(task, writer))

    def _note_stranger(self) -> None:
        self._num_strangers += 1

    def _load(self) -> WorkerLoad:
        return replace(self._service.load(), is_leaving=self._is_leaving)

    def _ended(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()  # here, since a task that never began closes nothing itself
        self._door.has_left(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("channel failed", exc_info=error)


class _Call:
    """One request of one Front."""

    def __init__(self, call: int) -> None:
        self.call = call
        self.task: asyncio.Task[None] | None = None
        self._credit = WINDOW_EVENTS
        self._has_credit = asyncio.Event()
        self._has_credit.set()

    def add_credit(self, events: int) -> None:
        """The reader has read so many; more than were sent is a broken protocol."""
        if not 0 < events <= WINDOW_EVENTS - self._credit:
            raise ChannelLostError(f"credit for {events} events that were not sent")
        self._credit += events
        self._has_credit.set()

    async def take_credit(self) -> None:
        """Wait until one more event may be sent, and count it."""
        await self._has_credit.wait()
        self._credit -= 1
        if not self._credit:
            self._has_credit.clear()


class _Connection:
    """One Front, from its greeting to its end."""

    def __init__(
        self,
        worker: str,
        service: ChannelService,
        load: Callable[[], WorkerLoad],
        timings: ChannelTimings,
        clock: Callable[[], float],
        on_stranger: Callable[[], None],
    ) -> None:
        self.is_admitted = False
        """Whether the Front has proved itself."""
        self._on_stranger = on_stranger
        self._worker = worker
        self._service = service
        self._load = load
        self._timings = timings
        self._clock = clock
        self._stream: FrameStream | None = None
        self._calls: dict[int, _Call] = {}
        self._events: list[tuple[int, WorkerEvent]] = []
        self._is_flush_due = False
        self._load_due_at = 0.0
        self._was_quiet = False

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, responder: Responder
    ) -> None:
        """Serve the connection; none of its requests runs any more when this returns."""
        try:
            stream = await accept(reader, writer, responder, self._timings)
        except ChannelLostError as error:
            self._on_stranger()
            logger.info("channel refused reason=%s", error)
            return
        self.is_admitted = True
        self._stream = stream
        try:
            self.report()
            await run_beside(self._read(stream), self._beat())
        except ChannelLostError as error:
            logger.info("channel ended requests=%d reason=%s", len(self._calls), error)
        finally:
            await self._cancel_all()

    def report(self) -> None:
        """Say how busy the worker is, with whatever else there is to say."""
        self._load_due_at = 0.0
        self._flush()

    async def finish(self) -> None:
        """Let requests that have just ended say so, then close."""
        if self._stream is None:
            return
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=self._timings.close_s)
        self._flush()
        await self._stream.finish(self._timings.close_s)

    async def _read(self, stream: FrameStream) -> None:
        while True:
            for frame in await stream.receive():
                match frame:
                    case Open():
                        self._open(frame)
                    case Cancel():
                        self._cancel(frame.call)
                    case Credit():
                        if (call := self._calls.get(frame.call)) is not None:
                            call.add_credit(frame.events)
                    case Events():
                        raise ChannelLostError("a Front sent events")

    def _open(self, frame: Open) -> None:
        if frame.call in self._calls:
            raise ChannelLostError(f"call {frame.call} is used twice")
        call = _Call(frame.call)
        self._calls[frame.call] = call
        call.task = asyncio.create_task(self._relay(call, frame.request))
        call.task.add_done_callback(lambda _: self._calls.pop(frame.call, None))

    def _cancel(self, call_id: int) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def _relay(self, call: _Call, request: GenerateRequest) -> None:
        """Send one request's events; closing the worker's iterator is what cancels it there."""
        try:
            async with aclosing(self._service.generate(request)) as events:
                async for event in events:
                    for piece in pieces(event):
                        await call.take_credit()
                        await self._writable()
                        self._send(call.call, piece)
        except Exception:  # a bug must end this request with a reply, and only this one
            logger.exception("request broke request_id=%s", request.request_id)
            failed = Failed(
                attempt=request.attempt, code=FailureCode.INTERNAL, message="the worker failed"
            )
            await call.take_credit()
            self._send(call.call, failed)

    async def _writable(self) -> None:
        assert self._stream is not None
        await self._stream.writable()

    def _send(self, call_id: int, event: WorkerEvent) -> None:
        """Send an event with all others of this turn of the loop: those of one engine step."""
        if isinstance(event, Heartbeat):
            event = replace(event, worker=self._worker)
        self._events.append((call_id, event))
        if len(self._events) >= MAX_EVENTS:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        load = self._due_load()
        if self._stream is not None and (self._events or load is not None):
            events, self._events = tuple(self._events), []
            self._was_quiet = False
            self._stream.send(Events(events=events, load=load))

    def _due_load(self) -> WorkerLoad | None:
        """The load without this Front's requests, unless it was sent just now."""
        now = self._clock()
        if now < self._load_due_at:
            return None
        self._load_due_at = now + self._timings.load_s
        load = self._load()
        return replace(load, requests=max(0, load.requests - len(self._calls)))

    async def _beat(self) -> None:
        """Be heard, and have the load known, where there is nothing else to send."""
        while True:
            self._was_quiet = True
            await asyncio.sleep(self._timings.beat_s)
            if self._was_quiet:
                self.report()

    async def _cancel_all(self) -> None:
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [call.task for call in self._calls.values() if call.task is not None]
