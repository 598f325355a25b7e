"""A hand-off as decode drives it: one prompt, from asking a prefill worker to its last byte.

Tries a few prefill workers, one after another. The sequence decodes only after a transfer was VALID
(INV-COVER), and whatever goes wrong, its blocks stay in quarantine until the transport's fence
(INV-FENCE). Whether a prompt is handed off at all is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.geometry import BlockId, KVLayout
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.transport import Clock, CorruptTransferError, Landed, PeerLostError, TransferError
from workers.call import Call
from workers.decode_config import DecodeConfig
from workers.engine.events import Admitted
from workers.engine.loop import Engine
from workers.messages import (
    GenerateRequest,
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
)
from workers.placement import PrefillOutlook, Prompt

__all__ = ["HandoffRefusedError", "Handoffs", "PrefillService"]

logger = logging.getLogger(__name__)

_LAST_ANSWER_TIMEOUT_S = 2.0
"""For the prefill worker's word that it holds nothing more; it follows the confirm at once."""


class HandoffRefusedError(TransferError):
    """A prefill worker does not take this prompt; it holds nothing for it."""


class PrefillService(Protocol):
    """The prefill pool as decode sees it."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Ask one prefill worker; see `PrefillWorker.prefill`."""


class Handoffs:
    """Brings prompts home for one decode worker; its calls are for the worker's event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        layout: KVLayout,
        config: DecodeConfig,
        receiver: KVReceiver,
        prefill: PrefillService,
        outlook: PrefillOutlook,
        clock: Clock,
        on_published: Callable[[Call], None],
    ) -> None:
        """`on_published` is told of each prompt that is here, confirmed, and decodes.

        `layout` is the pool's; `outlook` is told what hand-offs show of the prefill pool.
        """
        self._engine = engine
        self._layout = layout
        self._config = config
        self._receiver = receiver
        self._prefill = prefill
        self._outlook = outlook
        self._clock = clock
        self._on_published = on_published
        self._rest_until = 0.0
        self._failures: Counter[str] = Counter()

    @property
    def failures(self) -> Mapping[str, int]:
        """Attempts that were given up, by error."""
        return dict(self._failures)

    @property
    def is_resting(self) -> bool:
        """Whether the pool did not answer lately, so that nobody asks it for a while."""
        return self._clock() < self._rest_until

    async def bring(self, call: Call, admitted: Admitted) -> bool:
        """Try a few prefill workers; whether one of them did it, and the sequence decodes."""
        for epoch in range(self._config.attempts):
            if self.is_resting:
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

    async def _pull_once(self, call: Call, admitted: Admitted, epoch: int) -> None:
        """One attempt with one prefill worker: publishes, or raises, then only after the fence.

        The prefix hit is here already: only what is behind it is granted, fetched and covered.
        """
        missing = _missing(admitted, self._layout, len(call.token_ids))
        asked_at = self._clock()
        answers = self._prefill.prefill(self._request_of(call, epoch, admitted.num_hit_tokens))
        try:
            accepted = await self._ask(call, answers)
            accept_s = self._clock() - asked_at
            landed = await self._pull(call, accepted, missing)
            self._learn(call, admitted, landed, accept_s=accept_s)
            self._publish(call, landed)
            ended = await _read_to_end(answers)
            if ended is not None:
                self._outlook.heard(accepted.peer.worker_id, ended.load, self._clock())
        finally:
            await _close(answers)

    def _request_of(self, call: Call, epoch: int, skip_tokens: int) -> PrefillRequest:
        request = call.request
        return PrefillRequest(
            request_id=request.request_id,
            transfer_id=uuid.uuid4().hex,
            epoch=epoch,
            decode=self._receiver.me,
            prompt_token_ids=call.token_ids,
            sampling=request.sampling,
            timeout_s=self._time_left(call),
            skip_tokens=skip_tokens,
            cache_salt=request.cache_salt,
            num_resumed=len(request.resumed_token_ids),
        )

    async def _ask(self, call: Call, answers: AsyncIterator[PrefillEvent]) -> PrefillAccepted:
        """Have the prompt accepted, which is on its way until then."""
        num_tokens = len(call.token_ids)
        self._outlook.asked(num_tokens)
        try:
            accepted = await self._await_acceptance(answers)
        finally:
            self._outlook.answered(num_tokens)
        self._outlook.heard(accepted.peer.worker_id, accepted.load, self._clock())
        return accepted

    async def _pull(self, call: Call, accepted: PrefillAccepted, missing: _Missing) -> Landed:
        """Everything that is missing, from the worker that accepted."""
        try:
            transfer = self._receiver.transfer(
                peer=accepted.peer,
                key=accepted.key,
                placement=missing.placement,
                num_tokens=len(call.token_ids),
                deadline_s=self._time_left(call),
                first_tokens=missing.first_tokens,
            )
            landed = await self._land(call, transfer)
            _check_logprobs(call.request, landed)
        except TransferError:
            self._outlook.lost(accepted.peer.worker_id)
            raise
        call.prefilled_by = accepted.peer.worker_id
        return landed

    def _learn(self, call: Call, admitted: Admitted, landed: Landed, *, accept_s: float) -> None:
        num_tokens = len(call.token_ids)
        prompt = Prompt(num_tokens=num_tokens, num_missing=num_tokens - admitted.num_hit_tokens)
        self._outlook.landed(
            prompt, num_found=landed.first.num_hit_tokens, added_s=accept_s + landed.wait_s
        )

    def _publish(self, call: Call, landed: Landed) -> None:
        """Let the sequence decode: everything of its prompt is here, confirmed."""
        self._on_published(call)
        call.remote_hit_tokens = landed.first.num_hit_tokens
        if landed.prompt_logprobs:
            call.score_prompt(landed.prompt_logprobs)
        first = landed.first
        self._engine.publish(
            call.number, first.token_id, first.logprobs, first_tokens=landed.first_tokens
        )

    async def _land(self, call: Call, transfer: IncomingTransfer) -> Landed:
        """Pull; whatever goes wrong, the destination stays in quarantine until the fence."""
        call.is_written_to = True
        try:
            landed = await transfer.pull()
        except BaseException:
            self._engine.quarantine(call.number)
            await _finish_despite_cancel(self._fence(call, transfer))
            raise
        call.is_written_to = False
        transfer.release()
        return landed

    async def _fence(self, call: Call, transfer: IncomingTransfer) -> None:
        """Wait until the transfer writes no more, then let the blocks be used again."""
        try:
            await transfer.wait_quiesced()
        except (Exception, asyncio.CancelledError) as error:
            # A cancellation is the transfer's: nobody cancels this wait. Neither may look like an
            # attempt that failed: no other one, and no fallback, may use the blocks.
            raise RuntimeError("INV-FENCE: the transport kept no fence, blocks are lost") from error
        call.is_written_to = False
        self._engine.fence(call.number)

    def _time_left(self, call: Call) -> float:
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

    first_tokens: tuple[int, ...]
    """By group: of the prompt's tokens, the first that is not here and will be looked at."""
    placement: tuple[BlockId, ...]
    """Where the blocks from that on go, group by group."""


def _missing(admitted: Admitted, layout: KVLayout, num_tokens: int) -> _Missing:
    """What a prompt of num_tokens lacks, beside its prefix hit."""
    first_tokens = layout.first_tokens(num_tokens, num_found=admitted.num_hit_tokens)
    end = layout.blocks_for(num_tokens)
    cuts = (
        table.cut(first // layout.block_size, end)
        for table, first in zip(admitted.block_tables, first_tokens, strict=True)
    )
    return _Missing(
        first_tokens=first_tokens, placement=tuple(block_id for cut in cuts for block_id in cut)
    )


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


async def _read_to_end(answers: AsyncIterator[PrefillEvent]) -> PrefillEnded | None:
    """Let a call that has served its purpose end by itself: it is not to count as cancelled."""
    ended = None
    with contextlib.suppress(TimeoutError, TransferError):
        async with asyncio.timeout(_LAST_ANSWER_TIMEOUT_S):
            async for answer in answers:
                ended = answer if isinstance(answer, PrefillEnded) else None
    return ended


async def _close(answers: AsyncIterator[PrefillEvent]) -> None:
    """End the call to the prefill worker, which frees whatever it still holds for us."""
    aclose = getattr(answers, "aclose", None)
    if aclose is not None:
        await aclose()
