"""Front's side of one request in flight: a backend call for each choice, their deltas in one line.

Knows neither HTTP nor Ray. A `Run` is used as `async with run:`; leaving the block closes every
backend call that is still open, whatever the reason, which cancels it on its worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, Self

from deployments.openai.answer import Delta, Usage
from deployments.openai.errors import GenerationFailedError
from deployments.text.sequence_text import SequenceText, TextOptions
from workers.messages import FailureCode, Finished, GenerateEvent, GenerateRequest, TokenFrame

__all__ = ["Backend", "Run", "RunObserver", "SequencePlan"]

logger = logging.getLogger(__name__)

_MAILBOX_DELTAS = 256
"""A client that reads slowly holds up its own sequences here, not memory."""
_CLOSE_TIMEOUT_S = 5.0
"""A backend call that does not end within it is left to its worker's own timeouts."""


class Backend(Protocol):
    """A pool that generates: a local split or colocated one, later a remote one."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Token frames, then one `Finished` or `Failed`; closing the generator cancels."""

    async def is_ready(self) -> bool:
        """Whether a request would be served now."""


class RunObserver(Protocol):
    """Who is told how a request went; times in seconds."""

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first output token."""

    def token_gap(self, seconds: float) -> None:
        """Between two frames of tokens of one choice."""

    def ended(self, seconds: float | None, usage: Usage) -> None:
        """The request is over; seconds from its arrival if all its choices finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One choice, ready to be sent to a backend."""

    index: int
    prompt_index: int
    request: GenerateRequest
    """Its timeout is filled in when it is sent."""
    text: TextOptions


class _Mailbox:
    """Deltas of all choices in order of arrival; producers wait for room before they go on."""

    def __init__(self, limit: int) -> None:
        self._items: deque[Delta | Exception] = deque()
        self._limit = limit
        self._reader: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def room(self) -> None:
        """Wait until the reader has caught up."""
        await self._has_room.wait()

    def put(self, item: Delta | Exception) -> None:
        """Add an item; never waits, so that a producer that is being cancelled can still report."""
        self._items.append(item)
        self._wake_reader()
        if len(self._items) >= self._limit:
            self._has_room.clear()

    def take(self) -> list[Delta]:
        """All deltas that are there, up to a failure; raises the failure when it is the next."""
        taken: list[Delta] = []
        while self._items:
            item = self._items[0]
            if isinstance(item, Exception):
                if taken:
                    break
                raise item
            taken.append(item)
            self._items.popleft()
        self._has_room.set()
        return taken

    async def wait(self, timeout_s: float) -> None:
        """Return when there is something to take, or after the timeout.

        For one reader, which has just found nothing to take.
        """
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake_reader)
        try:
            await self._reader
        finally:
            timer.cancel()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Call:
    """One choice in flight."""

    def __init__(self, plan: SequencePlan) -> None:
        self.plan = plan
        self.text = SequenceText(plan.index, plan.text)
        self.last_token_at: float | None = None


class Run:
    """One request in flight: `receive` until `is_done`, inside `async with`."""

    def __init__(
        self,
        *,
        plans: Sequence[SequencePlan],
        backend: Backend,
        observer: RunObserver,
        clock: Callable[[], float],
        arrived_at: float,
        deadline: float,
    ) -> None:
        self._calls = [_Call(plan) for plan in plans]
        self._backend = backend
        self._observer = observer
        self._clock = clock
        self._arrived_at = arrived_at
        self._deadline = deadline
        self._mailbox = _Mailbox(_MAILBOX_DELTAS)
        self._tasks: dict[asyncio.Task[None], _Call] = {}
        self._num_open = len(self._calls)
        self._has_token = False

    @property
    def is_done(self) -> bool:
        """Whether the last delta of every choice has been received."""
        return self._num_open == 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(call.plan.request.prompt_token_ids) for call in self._first_calls())

    @property
    def usage(self) -> Usage:
        """Tokens so far; final once the run is done."""
        cached = [
            call.text.cached_tokens
            for call in self._first_calls()
            if call.text.cached_tokens is not None
        ]
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(call.text.completion_tokens for call in self._calls),
            cached_tokens=sum(cached) if cached else None,
        )

    async def __aenter__(self) -> Self:
        """Send every choice to the backend."""
        for call in self._calls:
            self._tasks[asyncio.create_task(self._relay(call))] = call
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every call; the ones that have ended may finish closing by themselves."""
        for task, call in self._tasks.items():
            if not call.text.has_ended:
                task.cancel()
        # Before any waiting: a second cancellation may come meanwhile.
        seconds = self._clock() - self._arrived_at if self.is_done else None
        self._observer.ended(seconds, self.usage)
        await self._wait_closed()

    async def receive(self, timeout_s: float = math.inf) -> list[Delta]:
        """The deltas that have come; none only if none came in time.

        Raises what a backend call failed with, or `GenerationFailedError` once the deadline is
        past; the run is over then.
        """
        give_up_at = self._clock() + timeout_s
        while True:
            deltas = self._mailbox.take()
            if deltas:
                self._num_open -= sum(delta.ending is not None for delta in deltas)
                return deltas
            now = self._clock()
            if now >= self._deadline:
                raise GenerationFailedError(FailureCode.DEADLINE_EXCEEDED, "the time is up")
            if now >= give_up_at:
                return []
            await self._mailbox.wait(min(self._deadline, give_up_at) - now)

    async def _relay(self, call: _Call) -> None:
        """Bring one call's events to the mailbox, as deltas, until it ends."""
        timeout_s = max(0.0, self._deadline - self._clock())
        request = replace(call.plan.request, timeout_s=timeout_s)
        try:
            async with aclosing(self._backend.generate(request)) as events:
                await self._relay_events(call, events)
        except Exception as error:  # noqa: BLE001 - raised by `receive`, in the request's own task
            if call.text.has_ended:  # the client has its answer; only the clean-up failed
                logger.warning("close failed request_id=%s: %r", request.request_id, error)
            else:
                self._mailbox.put(error)

    async def _relay_events(
        self,
        call: _Call,
        events: AsyncGenerator[GenerateEvent, None],
    ) -> None:
        async for event in events:
            if isinstance(event, TokenFrame):
                self._observe_tokens(call)
            delta = call.text.accept(event)
            if delta is not None:
                self._mailbox.put(delta)
            if call.text.has_ended:
                if isinstance(event, Finished):  # let it end by itself: nothing is to be cancelled
                    await anext(events, None)
                return
            await self._mailbox.room()
        message = "the backend's stream ended before the sequence did"
        raise GenerationFailedError(FailureCode.WORKER_LOST, message)

    def _observe_tokens(self, call: _Call) -> None:
        now = self._clock()
        if not self._has_token:
            self._has_token = True
            self._observer.first_token(now - self._arrived_at)
        if call.last_token_at is not None:
            self._observer.token_gap(now - call.last_token_at)
        call.last_token_at = now

    async def _wait_closed(self) -> None:
        """Wait for all tasks, but not for ever; a second cancel breaks off a close that hangs."""
        try:
            _, hanging = await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        for task in hanging:
            request_id = self._tasks[task].plan.request.request_id
            logger.warning("backend call does not close request_id=%s", request_id)
            task.cancel()

    def _first_calls(self) -> list[_Call]:
        """The first choice of each prompt: what they share is counted on it."""
        return list({call.plan.prompt_index: call for call in reversed(self._calls)}.values())
