"""The prefill worker: computes prompts, grants finished blocks, frees them when the hand-off ends.

It owns the life of a prompt on this side. It never decides where a request runs, never sees a
client, and never frees a block while a transfer may still read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kv_transfer.geometry import KVLayout, logical_block
from kv_transfer.handoff import (
    FirstToken,
    GrantedBlock,
    PeerInfo,
    ReleaseReason,
    TransferKey,
)
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.sender import KVSender, SenderStats
from kv_transfer.transport import Clock, TransferError
from workers.engine.block_table import BlockTable
from workers.engine.events import (
    Admitted,
    ChunkComputed,
    Event,
    PromptComputed,
    SequenceFailed,
)
from workers.engine.loop import Engine, EngineStats
from workers.engine.sequence import SequenceMode
from workers.engine.step import SequenceId
from workers.errors import WorkerError, WorkerStoppingError
from workers.failures import failure_code_of
from workers.messages import (
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillLoad,
    PrefillRefused,
    PrefillRequest,
    deadline_of,
)
from workers.runner_choice import RunnerChoice

logger = logging.getLogger(__name__)

_SERVED = frozenset({ReleaseReason.CONFIRMED, ReleaseReason.RELEASED})


@dataclass(slots=True, kw_only=True)
class _Job:
    """One prompt on its way: which blocks are granted already, and the answer to wait for."""

    request_id: str
    sequence_id: SequenceId
    num_prompt_tokens: int
    ended: asyncio.Future[ReleaseReason]
    first_blocks: tuple[int, ...]
    """By group: blocks before it are not granted, nobody sees them after the prompt."""
    block_tables: tuple[BlockTable, ...] = ()
    granted_blocks: int = 0
    """Of each group, leading blocks that are granted or will not be."""
    first: FirstToken | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those that no grant has had yet."""
    failure: str | None = None


class PrefillWorker:
    """One engine that computes prompts only, and the sender that hands their blocks over."""

    def __init__(
        self,
        *,
        engine: Engine,
        sender: KVSender,
        layout: KVLayout,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._layout = layout
        self._clock = clock
        self._jobs: dict[TransferKey, _Job] = {}
        self._me: PeerInfo | None = None
        self._is_stopping = False
        self._all_ended = asyncio.Event()

    @property
    def me(self) -> PeerInfo:
        """This process as decode workers must know it; only after `start`."""
        if self._me is None:
            raise RuntimeError("the prefill worker has not been started")
        return self._me

    @property
    def healthy(self) -> bool:
        """Whether prompts can still be computed, and handed over."""
        return self._engine.healthy and self._sender.healthy

    @property
    def runner_choice(self) -> RunnerChoice:
        """By which way this worker runs the model, and why; the same for as long as it lives."""
        return self._engine.runner_choice

    async def start(self) -> None:
        """Run the engine and listen for fetches."""
        self._engine.start()
        self._me = await self._sender.start()

    async def drain(self, *, timeout_s: float) -> None:
        """Take no more prompts, let hand-offs end for a while, revoke the rest, and stop.

        A worker whose step hangs or has failed waits for nothing: what it has is for others to do.
        """
        self._is_stopping = True
        num_begun = len(self._jobs)
        if self._jobs and self.healthy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all_ended.wait()
        logger.info("prefill drained hand_offs=%d revoked=%d", num_begun, len(self._jobs))
        await self.stop()

    async def stop(self) -> None:
        """End every hand-off, then the engine: blocks outlive the readers, never the reverse."""
        self._is_stopping = True
        await self._sender.close()
        await self._engine.stop()

    def stats(self) -> tuple[EngineStats, SenderStats]:
        """What `/metrics` shows of this worker."""
        return self._engine.stats(), self._sender.stats()

    def on_transfer_end(self, key: TransferKey, reason: ReleaseReason) -> None:
        """The sender's word that no peer reads the transfer's blocks any more: free them."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if reason in _SERVED and job.first is not None:
            self._engine.release(job.sequence_id)
        else:
            self._engine.cancel(job.sequence_id)
        if not job.ended.done():
            job.ended.set_result(reason)
        if self._is_stopping and not self._jobs:
            self._all_ended.set()

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        """Compute a prompt and keep its blocks for the decode worker until the hand-off ends.

        Yields `PrefillAccepted` at once and `PrefillEnded` when nothing is held any more, or a
        single `PrefillRefused`. Closing the iterator early revokes the hand-off.
        """
        key = TransferKey(
            transfer_id=request.transfer_id,
            epoch=request.epoch,
            prefill_incarnation=self.me.incarnation,
            decode_incarnation=request.decode.incarnation,
        )
        try:
            job = self._open(key, request)
        except (TransferError, WorkerError) as error:
            yield PrefillRefused(code=failure_code_of(error), message=str(error))
            return
        try:
            yield PrefillAccepted(key=key, peer=self.me, load=self._load())
            reason = await job.ended
            outcome = job.failure or reason.value
            yield PrefillEnded(key=key, outcome=outcome, load=self._load())
        finally:
            if key in self._jobs:
                self._sender.revoke(key, "the decode worker gave the request up")

    def _load(self) -> PrefillLoad:
        load = self._engine.load()
        return PrefillLoad(queued_tokens=load.queued_tokens, prompt_token_s=load.prompt_token_s)

    def _open(self, key: TransferKey, request: PrefillRequest) -> _Job:
        """Start the lease and queue the prompt; on failure neither is left behind."""
        if self._is_stopping or not self.healthy:
            raise WorkerStoppingError("the prefill worker is stopping")
        num_prompt_tokens = len(request.prompt_token_ids)
        first_blocks = tuple(
            token // self._layout.block_size
            for token in self._layout.first_tokens(num_prompt_tokens, num_found=request.skip_tokens)
        )
        self._sender.open(key, request.decode, first_blocks=first_blocks)
        try:
            sequence_id = self._engine.submit(
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                mode=SequenceMode.PREFILL_ONLY,
                deadline=deadline_of(request.timeout_s, self._clock()),
                cache_salt=request.cache_salt,
                num_resumed=request.num_resumed,
                sink=lambda event: self._on_engine_event(key, event),
            )
        except WorkerError as error:
            self._sender.revoke(key, str(error))
            raise
        job = _Job(
            request_id=request.request_id,
            sequence_id=sequence_id,
            num_prompt_tokens=num_prompt_tokens,
            first_blocks=first_blocks,
            ended=asyncio.get_running_loop().create_future(),
        )
        self._jobs[key] = job
        return job

    def _on_engine_event(self, key: TransferKey, event: Event) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        if isinstance(event, Admitted):  # what was found need not wait for the first chunk
            self._grant_computed(key, job, event.block_tables, event.num_hit_tokens)
        elif isinstance(event, ChunkComputed):
            job.prompt_logprobs += event.prompt_logprobs
            self._grant_computed(key, job, event.block_tables, event.num_computed)
        elif isinstance(event, PromptComputed):
            job.first = FirstToken(
                token_id=event.first_token,
                num_hit_tokens=event.num_hit_tokens,
                logprobs=event.logprobs,
            )
            self._grant(key, job, self._layout.blocks_for(job.num_prompt_tokens))
        elif isinstance(event, SequenceFailed):
            job.failure = str(event.error)
            self._sender.revoke(key, job.failure)

    def _grant_computed(
        self, key: TransferKey, job: _Job, block_tables: tuple[BlockTable, ...], num_computed: int
    ) -> None:
        """Grant the full blocks among the computed tokens."""
        job.block_tables = block_tables
        self._grant(key, job, num_computed // self._layout.block_size)

    def _grant(self, key: TransferKey, job: _Job, upto: int) -> None:
        """Grant the logical blocks that became final since the last grant."""
        blocks = tuple(
            self._granted(job, group, index)
            for group, first in enumerate(job.first_blocks)
            for index in range(max(job.granted_blocks, first), upto)
        )
        job.granted_blocks = max(job.granted_blocks, upto)
        if blocks or job.first is not None:
            logprobs, job.prompt_logprobs = job.prompt_logprobs, ()
            self._sender.grant(key, blocks, job.first, prompt_logprobs=logprobs)

    def _granted(self, job: _Job, group: int, index: int) -> GrantedBlock:
        block_id = job.block_tables[group].block(index)
        block_size = self._layout.block_size
        return GrantedBlock(
            logical=logical_block(group, index),
            block_id=block_id,
            generation=self._engine.generation_of(block_id),
            valid_tokens=min(block_size, job.num_prompt_tokens - index * block_size),
        )
