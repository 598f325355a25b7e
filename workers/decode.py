"""The decode worker: owns a request from admission to its last token; prefill is its helper.

For every request one task drives the hand-off and the engine delivers the tokens; the caller's
iterator only relays, so that a caller that leaves can never cut a clean-up short. Whatever ends a
request ends its sequence, and the sequence's last event ends the hand-off: one way for a deadline,
a stop, a failed engine and a caller that leaves. No token of a prompt that was computed elsewhere
leaves before its transfer was VALID (INV-COVER).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import PeerInfo
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.receiver import IncomingTransfer, KVReceiver, ReceiverStats
from kv_transfer.transport import CorruptTransferError, Landed, PeerLostError, TransferError
from workers.engine.events import (
    TERMINAL_EVENTS,
    Admitted,
    Event,
    PromptScored,
    SequenceFailed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.loop import Engine, EngineStats
from workers.engine.sequence import SequenceMode
from workers.engine.step import SequenceId
from workers.errors import WorkerError, WorkerStoppingError
from workers.failures import failure_code_of
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    GenerateRequest,
    Heartbeat,
    PrefillAccepted,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
    deadline_of,
)
from workers.outbox import Outbox

logger = logging.getLogger(__name__)

_LAST_ANSWER_TIMEOUT_S = 2.0
"""For the prefill worker's word that it holds nothing more; it follows the confirm at once."""


class HandoffRefusedError(TransferError):
    """A prefill worker does not take this prompt; it holds nothing for it."""


class PrefillService(Protocol):
    """The prefill pool as decode sees it."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Ask one prefill worker; see `PrefillWorker.prefill`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """When a prompt is computed elsewhere, and how long decode waits for it."""

    local_prefill_tokens: int
    """Prompts up to this length are prefilled here: moving them costs more than computing them."""
    transfer_deadline_s: float
    accept_timeout_s: float = 2.0
    """Until a prefill worker answers at all; after that decode goes on without."""
    attempts: int = 2
    """Prefill workers tried before the prompt is computed here."""
    heartbeat_s: float = 0.5
    """Between two signs of life to the reader of a quiet request."""
    rest_s: float = 2.0
    """After a prefill pool did not answer, prompts are computed here for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    """Where prompts were computed, and why a hand-off was given up."""

    local_prompts: int
    remote_prompts: int
    fallback_prompts: int
    active: int
    """Hand-offs under way, fences that are waited for included."""
    failures: dict[str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One request inside the worker."""

    request: GenerateRequest
    deadline: float | None
    """On this process's clock."""
    outbox: Outbox = field(default_factory=Outbox)
    sequence_id: SequenceId | None = None
    prefilled_by: str = ""
    driver: asyncio.Task[None] | None = None
    remote_hit_tokens: int | None = None
    """Prompt tokens that the prefill worker found, once it has computed the rest."""
    is_written_to: bool = False
    """Whether a transfer may be writing to the sequence's blocks."""
    admitted: asyncio.Future[Admitted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What needs KV before the next token: the prompt, and what an earlier attempt made."""
        return self.request.prompt_token_ids + self.request.resumed_token_ids


class DecodeWorker:
    """One engine that decodes, and the receiver that pulls prompts' blocks into it."""

    def __init__(
        self,
        *,
        engine: Engine,
        me: PeerInfo,
        config: DecodeConfig,
        receiver: KVReceiver | None = None,
        prefill: PrefillService | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._me = me
        self._config = config
        self._receiver = receiver
        self._prefill = prefill
        self._clock = clock
        self._drivers: set[asyncio.Task[None]] = set()
        self._calls: list[_Call] = []
        self._beating: asyncio.Task[None] | None = None
        self._is_draining = False
        self._all_served = asyncio.Event()
        self._rest_until = 0.0
        self._placed: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    @property
    def me(self) -> PeerInfo:
        """This process as prefill workers must know it."""
        return self._me

    @property
    def healthy(self) -> bool:
        """Whether the step loop can still produce tokens."""
        return self._engine.healthy

    async def start(self) -> None:
        """Run the engine and the transfer thread, and give signs of life."""
        self._engine.start()
        self._beating = asyncio.create_task(self._beat())
        if self._receiver is not None:
            await self._receiver.start()

    async def drain(self, *, timeout_s: float) -> None:
        """Take nothing more, let what runs finish for a while, fail the rest, and stop."""
        self._is_draining = True
        if self._calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_served.wait()
        await self.stop()

    async def stop(self) -> None:
        """Fail what is left and take nothing more; returns after every fence. Safe to repeat."""
        await self._engine.stop()  # ends every sequence, and with it every hand-off
        await asyncio.gather(*self._drivers, return_exceptions=True)
        if self._beating is not None:
            self._beating.cancel()
        if self._receiver is not None:
            await self._receiver.close()

    def stats(self) -> tuple[EngineStats, ReceiverStats | None, HandoffStats]:
        """What `/metrics` shows of this worker."""
        receiver = self._receiver.stats() if self._receiver is not None else None
        handoff = HandoffStats(
            local_prompts=self._placed["local"],
            remote_prompts=self._placed["remote"],
            fallback_prompts=self._placed["fallback"],
            active=len(self._drivers),
            failures=dict(self._failures),
        )
        return self._engine.stats(), receiver, handoff

    async def generate(self, request: GenerateRequest) -> AsyncIterator[WorkerEvent]:
        """Generate one sequence: token frames, then exactly one `Finished` or `Failed`.

        Between them are heartbeats, wherever nothing else is sent for some `heartbeat_s`. Closing
        the iterator cancels the request; what it held is freed as soon as that is safe.
        """
        deadline = deadline_of(request.timeout_s, self._clock())
        call = _Call(request=request, deadline=deadline)
        try:
            self._admit(call)
        except WorkerError as error:
            yield _failed(request, error)
            return
        self._calls.append(call)
        try:
            while True:
                event = await call.outbox.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            assert call.sequence_id is not None
            self._engine.cancel(call.sequence_id)  # without effect if it has ended
            self._calls.remove(call)
            if self._is_draining and not self._calls:
                self._all_served.set()

    async def _beat(self) -> None:
        """Let the readers of quiet requests know that this process lives."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            for call in self._calls:
                attempt = call.request.attempt
                call.outbox.beat(Heartbeat(attempt=attempt, worker=self._me.worker_id))

    def _admit(self, call: _Call) -> None:
        """Queue the sequence for its reservation; it costs nothing yet."""
        request = call.request
        if self._is_draining:
            raise WorkerStoppingError("the worker is draining: it takes no new requests")
        remote = self._is_remote(len(call.token_ids))
        call.sequence_id = self._engine.submit(
            prompt_token_ids=call.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.AWAIT_KV if remote else SequenceMode.GENERATE,
            priority=request.priority,
            deadline=call.deadline,
            cache_salt=request.cache_salt,
            num_resumed=len(request.resumed_token_ids),
            sink=lambda event: self._on_engine_event(call, event),
        )
        if remote:
            call.driver = asyncio.create_task(self._drive_handoff(call))
            self._drivers.add(call.driver)
            call.driver.add_done_callback(lambda driver: self._on_handoff_ended(call, driver))
        else:
            self._placed["local"] += 1
            call.prefilled_by = self._me.worker_id

    def _is_remote(self, num_prompt_tokens: int) -> bool:
        if self._prefill is None or self._receiver is None:
            return False
        if num_prompt_tokens <= self._config.local_prefill_tokens:
            return False
        return self._clock() >= self._rest_until

    def _on_engine_event(self, call: _Call, event: Event) -> None:
        if isinstance(event, TERMINAL_EVENTS) and call.driver is not None:
            call.driver.cancel()  # without effect if it has brought the prompt home
        if isinstance(event, Admitted):
            if not call.admitted.done():
                call.admitted.set_result(event)
        elif isinstance(event, TokensSampled):
            frame = TokenFrame(
                attempt=call.request.attempt,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                cached_tokens=_cached_tokens(call, event),
            )
            call.outbox.put(frame)
        elif isinstance(event, PromptScored):
            self._pass_on_prompt(call, event.logprobs)
        elif isinstance(event, SequenceFinished):
            finished = Finished(
                attempt=call.request.attempt,
                reason=event.reason,
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_tokens=_cached_tokens(call, event),
                prefilled_by=call.prefilled_by,
                stop_token_id=event.stop_token_id,
            )
            call.outbox.put(finished)
        elif isinstance(event, SequenceFailed):
            call.outbox.put(_failed(call.request, event.error))

    def _pass_on_prompt(self, call: _Call, logprobs: tuple[TokenLogprobs, ...]) -> None:
        call.outbox.put(PromptFrame(attempt=call.request.attempt, logprobs=logprobs))

    # The hand-off -------------------------------------------------------------------------------

    async def _drive_handoff(self, call: _Call) -> None:
        """Get the prompt's KV from a prefill worker, or compute it here; never neither."""
        assert call.sequence_id is not None
        try:
            admitted = await call.admitted
            num_missing = len(call.token_ids) - admitted.num_hit_tokens
            if num_missing <= self._config.local_prefill_tokens:
                self._prefill_here(call, "local")
                return
            is_published = await self._try_prefill_workers(call, admitted)
        except Exception as error:  # a bug here must end this request, visibly
            logger.exception("hand-off broke request_id=%s", call.request.request_id)
            call.outbox.put(_failed(call.request, WorkerError(f"hand-off: {error!r}")))
            self._engine.cancel(call.sequence_id)
            return
        if not is_published:
            self._prefill_here(call, "fallback")

    def _prefill_here(self, call: _Call, place: str) -> None:
        """Compute what is missing of the prompt on this worker."""
        assert call.sequence_id is not None
        self._placed[place] += 1
        call.prefilled_by = self._me.worker_id
        self._engine.prefill_here(call.sequence_id)

    def _on_handoff_ended(self, call: _Call, driver: asyncio.Task[None]) -> None:
        """Give the engine the word that an ended sequence's blocks wait for.

        A callback, since a task that is cancelled before its first step runs nothing of its own.
        """
        assert call.sequence_id is not None
        self._drivers.discard(driver)
        if not call.is_written_to:
            self._engine.fence(call.sequence_id)

    async def _try_prefill_workers(self, call: _Call, admitted: Admitted) -> bool:
        """Try a few prefill workers; whether one of them did it, and the sequence decodes."""
        for epoch in range(self._config.attempts):
            if self._clock() < self._rest_until:
                break
            try:
                await self._pull_once(call, admitted, epoch)
            except TransferError as error:
                self._failures[type(error).__name__] += 1
                logger.warning(
                    "hand-off attempt failed request_id=%s epoch=%d error=%s: %s",
                    call.request.request_id,
                    epoch,
                    type(error).__name__,
                    error,
                )
            else:
                return True
        return False

    async def _pull_once(self, call: _Call, admitted: Admitted, epoch: int) -> None:
        """One attempt with one prefill worker: publishes, or raises, then only after the fence.

        The prefix hit is here already: only what is behind it is granted, fetched and covered.
        """
        assert self._prefill is not None
        assert self._receiver is not None
        request = call.request
        block_size = self._me.block_size
        skip_blocks = admitted.num_hit_tokens // block_size
        end = ceil_div(len(call.token_ids), block_size)
        missing = _missing(admitted, skip_blocks, end)
        answers = self._prefill.prefill(
            PrefillRequest(
                request_id=request.request_id,
                transfer_id=uuid.uuid4().hex,
                epoch=epoch,
                decode=self._me,
                prompt_token_ids=call.token_ids,
                sampling=request.sampling,
                timeout_s=self._time_left(call),
                skip_blocks=skip_blocks,
                cache_salt=request.cache_salt,
                num_resumed=len(request.resumed_token_ids),
            )
        )
        try:
            accepted = await self._await_acceptance(answers)
            transfer = self._receiver.transfer(
                peer=accepted.peer,
                key=accepted.key,
                placement=missing.placement,
                num_tokens=len(call.token_ids),
                deadline_s=self._time_left(call),
                first_blocks=missing.first_blocks,
            )
            landed = await self._land(call, transfer)
            _check_logprobs(request, landed)
            call.prefilled_by = accepted.peer.worker_id
            self._publish(call, landed)
            await _read_to_end(answers)
        finally:
            await _close(answers)

    def _publish(self, call: _Call, landed: Landed) -> None:
        """Let the sequence decode: everything of its prompt is here, confirmed."""
        assert call.sequence_id is not None
        self._placed["remote"] += 1
        call.remote_hit_tokens = landed.first.num_hit_tokens
        if landed.prompt_logprobs:
            self._pass_on_prompt(call, landed.prompt_logprobs)
        self._engine.publish(call.sequence_id, landed.first.token_id, landed.first.logprobs)

    async def _land(self, call: _Call, transfer: IncomingTransfer) -> Landed:
        """Pull; whatever goes wrong, the destination stays in quarantine until the fence."""
        assert call.sequence_id is not None
        call.is_written_to = True
        try:
            landed = await transfer.pull()
        except BaseException:
            self._engine.quarantine(call.sequence_id)
            await _finish_despite_cancel(self._fence(call, transfer))
            raise
        call.is_written_to = False
        transfer.release()
        return landed

    async def _fence(self, call: _Call, transfer: IncomingTransfer) -> None:
        """Wait until the transfer writes no more, then let the blocks be used again."""
        assert call.sequence_id is not None
        try:
            await transfer.wait_quiesced()
        except (Exception, asyncio.CancelledError) as error:
            # A cancellation is the transfer's: nobody cancels this wait. Neither may look like an
            # attempt that failed: no other one, and no fallback, may use the blocks.
            raise RuntimeError("INV-FENCE: the transport kept no fence, blocks are lost") from error
        call.is_written_to = False
        self._engine.fence(call.sequence_id)

    def _time_left(self, call: _Call) -> float:
        """Seconds that a transfer may take."""
        if call.deadline is None:
            return self._config.transfer_deadline_s
        left = max(0.0, call.deadline - self._clock())
        return min(self._config.transfer_deadline_s, left)

    async def _await_acceptance(self, answers: AsyncIterator[PrefillEvent]) -> PrefillAccepted:
        try:
            async with asyncio.timeout(self._config.accept_timeout_s):
                answer = await anext(answers)
        except TimeoutError:
            self._rest_until = self._clock() + self._config.rest_s
            raise PeerLostError(
                f"no prefill worker answered within {self._config.accept_timeout_s} s"
            ) from None
        except StopAsyncIteration:
            raise PeerLostError("the prefill worker ended the call without an answer") from None
        if isinstance(answer, PrefillRefused):
            raise HandoffRefusedError(f"{answer.code.value}: {answer.message}")
        if not isinstance(answer, PrefillAccepted):
            raise PeerLostError(f"the prefill worker's first answer was {type(answer).__name__}")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """What a hand-off is to bring."""

    first_blocks: tuple[int, ...]
    """By group: of the prompt's blocks, the first that is not here and will be looked at."""
    placement: tuple[BlockId, ...]
    """Where they go, group by group."""


def _missing(admitted: Admitted, skip_blocks: int, end: int) -> _Missing:
    """What a prompt of `end` blocks lacks, of which the first skip_blocks are a prefix hit."""
    first_blocks = tuple(max(skip_blocks, table.start) for table in admitted.block_tables)
    cuts = (
        table.cut(first, end)
        for table, first in zip(admitted.block_tables, first_blocks, strict=True)
    )
    return _Missing(
        first_blocks=first_blocks, placement=tuple(block_id for cut in cuts for block_id in cut)
    )


def _cached_tokens(call: _Call, event: TokensSampled | SequenceFinished) -> int:
    """Prompt tokens that nobody computed: the hit of the worker that computed the others."""
    remote = call.remote_hit_tokens
    hit = event.num_hit_tokens if remote is None else remote
    return min(
        hit, len(call.request.prompt_token_ids)
    )  # an earlier attempt's output may be hit too


def _check_logprobs(request: GenerateRequest, landed: Landed) -> None:
    """The grants brought the log-probabilities that the request asks for, of every token."""
    sampling = request.sampling
    is_scored = sampling.prompt_logprobs is not None
    expected = len(request.prompt_token_ids) - 1 if is_scored else 0
    has_first = landed.first.logprobs is not None
    if len(landed.prompt_logprobs) != expected or has_first != (sampling.logprobs is not None):
        raise CorruptTransferError(
            f"log-probabilities came for {len(landed.prompt_logprobs)} of {expected} prompt tokens "
            f"and {int(has_first)} output tokens"
        )


async def _finish_despite_cancel(waiting: Coroutine[object, object, None]) -> None:
    """Wait to the end: a fence may not be skipped. A cancellation takes effect after it."""
    task = asyncio.ensure_future(waiting)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            interruption = error
    task.result()
    if interruption is not None:
        raise interruption


async def _read_to_end(answers: AsyncIterator[PrefillEvent]) -> None:
    """Let a call that has served its purpose end by itself: it is not to count as cancelled."""
    with contextlib.suppress(TimeoutError, TransferError):
        async with asyncio.timeout(_LAST_ANSWER_TIMEOUT_S):
            async for _ in answers:
                pass


async def _close(answers: AsyncIterator[PrefillEvent]) -> None:
    """End the call to the prefill worker, which frees whatever it still holds for us."""
    aclose = getattr(answers, "aclose", None)
    if aclose is not None:
        await aclose()


def _failed(request: GenerateRequest, error: WorkerError) -> Failed:
    code = failure_code_of(error)
    retry_after_s = 1.0 if code is FailureCode.QUEUE_FULL else None
    return Failed(
        attempt=request.attempt, code=code, message=str(error), retry_after_s=retry_after_s
    )
