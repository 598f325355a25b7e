"""A request that outlives the decode worker it began on.

Every attempt but the first goes on from the tokens that the reader has: the engine's draws are a
function of seed and position, so the text is the one that the lost worker would have made. An
attempt that is given up is closed, which fences it: nothing that it sends can be read any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol

from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Heartbeat,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
    deadline_of,
)

__all__ = ["Loss", "ResumeConfig", "ResumingBackend", "WorkerPool"]

logger = logging.getLogger(__name__)


class Loss(Enum):
    """Why an attempt was given up."""

    LOST = "lost"
    """The worker died, or the way to it."""
    STOPPING = "stopping"
    """The worker takes or keeps no requests: it is about to go."""
    SILENT = "silent"
    """The worker had the request, and then gave no sign of life."""
    UNANSWERED = "unanswered"
    """No worker said that it has the request."""


_LOSSES: Final[Mapping[FailureCode, Loss]] = MappingProxyType(
    {FailureCode.WORKER_LOST: Loss.LOST, FailureCode.WORKER_STOPPING: Loss.STOPPING}
)
"""Failures of a worker, not of the request."""


class WorkerPool(Protocol):
    """The decode workers, any of which may take a request."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """One attempt on one worker; closing the generator cancels it."""

    async def is_ready(self) -> bool:
        """Whether a worker takes requests now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """When an attempt is given up, and when the request is."""

    silence_s: float
    """Without a sign of life of a worker that has the request; several of its heartbeats."""
    answer_s: float = 5.0
    """Until a worker has the request at all; then it is sent anew, to whoever is there now."""
    max_losses: int = 4
    """Workers that one request may lose: what brings its workers down must not bring all down."""
    pause_s: float = 0.1
    """Before the second attempt; doubles with each loss."""


class ResumingBackend:
    """The `Backend` over a pool of workers that come and go."""

    def __init__(
        self,
        pool: WorkerPool,
        config: ResumeConfig,
        *,
        clock: Callable[[], float],
        on_loss: Callable[[Loss], None],
    ) -> None:
        """`on_loss` is told of every attempt that is given up, for the metrics."""
        self._pool = pool
        self._config = config
        self._clock = clock
        self._on_loss = on_loss
        self._is_stopping = False
        self._has_ended = False
        self._limits: set[asyncio.Timeout] = set()
        """Of every wait for a worker's next word."""

    def stop_resuming(self) -> None:
        """The workers are about to go, and no others will come: who loses its worker ends."""
        self._is_stopping = True

    def end_all(self) -> None:
        """End every request, whatever it waits for, with WORKER_STOPPING; new ones as well."""
        self._is_stopping = self._has_ended = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

    async def is_ready(self) -> bool:
        """See `Backend.is_ready`."""
        return not self._is_stopping and await self._pool.is_ready()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """See `Backend.generate`; losing a worker shows as a pause."""
        trail = _Trail(request, deadline=deadline_of(request.timeout_s, self._clock()))
        while True:
            attempt = trail.next_attempt(self._clock())
            if isinstance(attempt, Finished | Failed):
                yield attempt
                return
            async with aclosing(self._attempt(attempt, trail)) as events:
                async for event in events:
                    yield event
            if trail.loss is None:
                return
            self._on_loss(trail.loss)
            trail.log()
            if self._is_stopping or trail.num_losses >= self._config.max_losses:
                yield trail.last_word()
                return
            await asyncio.sleep(self._config.pause_s * 2**trail.num_losses)

    async def _attempt(
        self, attempt: GenerateRequest, trail: _Trail
    ) -> AsyncGenerator[GenerateEvent, None]:
        """What one worker sends, up to its end or to its loss, which the trail then has."""
        patience_s, silence = self._config.answer_s, Loss.UNANSWERED
        async with aclosing(self._pool.generate(attempt)) as events:
            while True:
                try:
                    async with self._limit(patience_s):
                        event = await anext(events, None)
                except TimeoutError:
                    if self._has_ended:
                        trail.stop()
                    else:
                        trail.lose(silence)
                    return
                patience_s, silence = self._config.silence_s, Loss.SILENT
                if event is None:
                    trail.lose(Loss.LOST)
                elif isinstance(event, Failed) and event.code in _LOSSES:
                    trail.lose(_LOSSES[event.code], event)
                elif isinstance(event, Heartbeat):
                    trail.worker = event.worker
                    continue
                elif isinstance(event, Finished | Failed):
                    yield event
                else:
                    yield trail.take(event)
                    continue
                return

    @asynccontextmanager
    async def _limit(self, patience_s: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, and over at once when everything is to end."""
        async with asyncio.timeout(0.0 if self._has_ended else patience_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.remove(limit)


class _Trail:
    """One request over all of its attempts."""

    def __init__(self, request: GenerateRequest, *, deadline: float | None) -> None:
        self._request = request
        self._deadline = deadline
        self._emitted = list(request.resumed_token_ids)
        self._num_scored = 0
        """Prompt tokens whose log-probabilities the reader has."""
        self._to_skip = 0
        """Those of them that the attempt which runs will send again."""
        self._avoid = list(request.avoid)
        self._num_attempts = 0
        self.worker: str | None = None
        """Who has the attempt that runs, once it said so."""
        self.loss: Loss | None = None
        """How the last attempt was lost; None while one runs, or if it ended by itself."""
        self.num_losses = 0
        """Attempts lost by a worker that had them; waiting for one to be there is none."""
        self.failure = self._failed(FailureCode.WORKER_LOST, "the decode worker was lost")
        """What to answer if there is no further attempt."""

    def next_attempt(self, now: float) -> GenerateRequest | Finished | Failed:
        """The request for the next worker, or how the sequence ends without one."""
        self.loss, self.worker = None, None
        if self._is_whole:
            return self._finished()
        timeout_s = None if self._deadline is None else self._deadline - now
        if timeout_s is not None and timeout_s <= 0:
            return self._failed(FailureCode.DEADLINE_EXCEEDED, "the time is up")
        self._to_skip = self._num_scored
        sampling = self._request.sampling
        if self._emitted:  # what is said of the prompt came before the first token
            sampling = replace(sampling, prompt_logprobs=None)
        attempt = replace(
            self._request,
            sampling=sampling,
            attempt=self._request.attempt + self._num_attempts,
            timeout_s=timeout_s,
            resumed_token_ids=tuple(self._emitted),
            avoid=tuple(self._avoid),
        )
        self._num_attempts += 1
        return attempt

    def take(self, frame: PromptFrame | TokenFrame) -> PromptFrame | TokenFrame:
        """What the reader gets for this frame: nothing twice."""
        if isinstance(frame, TokenFrame):
            self._emitted += frame.token_ids
            return frame
        logprobs = frame.logprobs[self._to_skip :]
        self._to_skip -= len(frame.logprobs) - len(logprobs)
        self._num_scored += len(logprobs)
        return replace(frame, logprobs=logprobs)

    def last_word(self) -> Finished | Failed:
        """How the sequence ends if no worker takes it any more."""
        return self._finished() if self._is_whole else self.failure

    def stop(self) -> None:
        """The attempt that ran is given up since everything ends."""
        message = "the service is stopping"
        self.lose(Loss.STOPPING, self._failed(FailureCode.WORKER_STOPPING, message))

    def lose(self, loss: Loss, failure: Failed | None = None) -> None:
        """The attempt that ran is given up; `failure` is what its worker said."""
        self.loss = loss
        self.num_losses += loss is not Loss.UNANSWERED
        if self.worker is not None:
            self._avoid.append(self.worker)
        if failure is not None:
            self.failure = failure

    def log(self) -> None:
        """One line about the attempt that was lost."""
        logger.warning(
            "attempt given up request_id=%s attempt=%d cause=%s worker=%s emitted_tokens=%d",
            self._request.request_id,
            self._request.attempt + self._num_attempts - 1,
            self.loss.value if self.loss is not None else "-",
            self.worker,
            len(self._emitted),
        )

    @property
    def _is_whole(self) -> bool:
        """Whether the worker was lost between its last token and its last word."""
        return len(self._emitted) >= self._request.sampling.max_tokens

    def _finished(self) -> Finished:
        return Finished(
            attempt=self._request.attempt,
            reason=FinishReason.LENGTH,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self._emitted),
        )

    def _failed(self, code: FailureCode, message: str) -> Failed:
        return Failed(attempt=self._request.attempt, code=code, message=message)
