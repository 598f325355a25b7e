"""The decode worker: owns a request from admission to its last token; prefill is its helper.

For every request one task drives the hand-off and the engine delivers the tokens; the caller's
iterator only relays, so that a caller that leaves can never cut a clean-up short. Whatever ends a
request ends its sequence, and the sequence's last event ends the hand-off: one way for a deadline,
a stop, a failed engine and a caller that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo
from kv_transfer.receiver import KVReceiver
from kv_transfer.receiver_stats import ReceiverStats
from kv_transfer.transport import Clock
from workers.call import Call, failed
from workers.decode_config import DecodeConfig
from workers.engine.events import TERMINAL_EVENTS, Admitted, Event
from workers.engine.loop import Engine, EngineStats
from workers.engine.sequence import SequenceMode
from workers.errors import WorkerError, WorkerStoppingError
from workers.handoff import Handoffs, PrefillService
from workers.messages import (
    Failed,
    Finished,
    GenerateRequest,
    Heartbeat,
    WorkerEvent,
    WorkerLoad,
    deadline_of,
)
from workers.placement import (
    PLACES,
    Decision,
    Place,
    PlacementConfig,
    PlacementRule,
    PrefillOutlook,
    Prompt,
    Reason,
)
from workers.runner_choice import RunnerChoice

__all__ = ["DecodeWorker", "HandoffStats"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    """Where prompts were computed and why, and why a hand-off was given up."""

    prompts: Mapping[tuple[Place, Reason], int]
    active: int
    """Hand-offs under way, fences that are waited for included."""
    failures: Mapping[str, int]

    def placed(self, place: Place) -> int:
        """Prompts that were computed there, for any reason."""
        return sum(self.prompts.get((place, reason), 0) for reason in PLACES[place])


class DecodeWorker:
    """One engine that decodes, and the receiver that pulls prompts' blocks into it."""

    def __init__(
        self,
        *,
        engine: Engine,
        me: PeerInfo,
        layout: KVLayout,
        config: DecodeConfig,
        receiver: KVReceiver | None = None,
        prefill: PrefillService | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Without receiver and prefill, which come together, it computes every prompt itself.

        `layout` is the pool's.
        """
        self._engine = engine
        self._me = me
        self._config = config
        self._receiver = receiver
        self._clock = clock
        outlook = PrefillOutlook(block_size=me.block_size)
        self._rule = PlacementRule(
            PlacementConfig(
                local_prefill_tokens=config.local_prefill_tokens,
                is_by_cost=config.is_placed_by_cost,
            ),
            outlook,
        )
        self._handoffs: Handoffs | None = None
        if receiver is not None and prefill is not None:
            self._handoffs = Handoffs(
                engine=engine,
                layout=layout,
                config=config,
                receiver=receiver,
                prefill=prefill,
                outlook=outlook,
                clock=clock,
                on_published=self._on_published,
            )
        self._drivers: set[asyncio.Task[None]] = set()
        self._calls: list[Call] = []
        self._beating: asyncio.Task[None] | None = None
        self._is_draining = False
        self._all_served = asyncio.Event()
        self._placed: Counter[tuple[Place, Reason]] = Counter()

    @property
    def me(self) -> PeerInfo:
        """This process as prefill workers must know it."""
        return self._me

    @property
    def healthy(self) -> bool:
        """Whether tokens can still be produced, and prompts fetched."""
        can_fetch = self._receiver is None or self._receiver.healthy
        return self._engine.healthy and can_fetch

    @property
    def runner_choice(self) -> RunnerChoice:
        """By which way this worker runs the model, and why; the same for as long as it lives."""
        return self._engine.runner_choice

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
        if self._receiver is None or self._receiver.healthy:  # else nothing ends them
            await asyncio.gather(*self._drivers, return_exceptions=True)
        if self._beating is not None:
            self._beating.cancel()
        if self._receiver is not None:
            await self._receiver.close()

    def stats(self) -> tuple[EngineStats, ReceiverStats | None, HandoffStats]:
        """What `/metrics` shows of this worker."""
        receiver = self._receiver.stats() if self._receiver is not None else None
        handoff = HandoffStats(
            prompts=dict(self._placed),
            active=len(self._drivers),
            failures=self._handoffs.failures if self._handoffs is not None else {},
        )
        return self._engine.stats(), receiver, handoff

    def load(self) -> WorkerLoad:
        """How busy this worker is, for who chooses among several."""
        stats = self._engine.stats()
        return WorkerLoad(
            takes_requests=self.healthy,
            requests=len(self._calls),
            waiting=stats.waiting,
            available_blocks=stats.free_blocks + stats.cached_blocks,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """Generate one sequence: token frames, then exactly one `Finished` or `Failed`.

        Between them are heartbeats, wherever nothing else is sent for some `heartbeat_s`. Closing
        the iterator cancels the request; what it held is freed as soon as that is safe.
        """
        deadline = deadline_of(request.timeout_s, self._clock())
        call = Call(request=request, deadline=deadline)
        try:
            self._admit(call)
        except WorkerError as error:
            yield failed(request, error)
            return
        self._calls.append(call)
        try:
            while True:
                event = await call.outbox.get()
                yield event
                if isinstance(event, Finished | Failed):
                    return
        finally:
            self._engine.cancel(call.number)  # without effect if it has ended
            self._calls.remove(call)
            if self._is_draining and not self._calls:
                self._all_served.set()

    async def _beat(self) -> None:
        """Let the readers of quiet requests know that they are worked on.

        Not where a step hangs: this loop lives, and no request goes on.
        """
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            for call in self._calls if self.healthy else ():
                attempt = call.request.attempt
                call.outbox.beat(Heartbeat(attempt=attempt, worker=self._me.worker_id))

    def _admit(self, call: Call) -> None:
        """Queue the sequence for its reservation; it costs nothing yet."""
        request = call.request
        if self._is_draining:
            raise WorkerStoppingError("the worker is draining: it takes no new requests")
        handoffs = self._handoffs_for(call)
        call.sequence_id = self._engine.submit(
            prompt_token_ids=call.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.AWAIT_KV if handoffs is not None else SequenceMode.GENERATE,
            priority=request.priority,
            deadline=call.deadline,
            cache_salt=request.cache_salt,
            num_resumed=len(request.resumed_token_ids),
            sink=lambda event: self._on_engine_event(call, event),
        )
        if handoffs is not None:
            call.driver = asyncio.create_task(self._drive_handoff(call, handoffs))
            self._drivers.add(call.driver)
            call.driver.add_done_callback(lambda driver: self._on_handoff_ended(call, driver))
        else:
            self._placed["local", call.reason] += 1
            call.prefilled_by = self._me.worker_id

    def _handoffs_for(self, call: Call) -> Handoffs | None:
        """What may bring a prompt home; None if it is computed here whatever is found of it."""
        if self._handoffs is None:
            call.reason = Reason.ALONE
        elif self._handoffs.is_resting or not self.healthy:
            call.reason = Reason.RESTING
        elif len(call.token_ids) <= self._config.local_prefill_tokens:
            call.reason = Reason.SHORT
        else:
            return self._handoffs
        return None

    def _on_engine_event(self, call: Call, event: Event) -> None:
        if isinstance(event, TERMINAL_EVENTS) and call.driver is not None:
            # Where the prompt has been brought home, all that this cuts off is prefill's last word.
            call.driver.cancel()
        if not isinstance(event, Admitted):
            call.relay(event)
        elif not call.admitted.done():
            call.admitted.set_result(event)

    # -- where a prompt is computed -------------------------------------------------------------

    async def _drive_handoff(self, call: Call, handoffs: Handoffs) -> None:
        """Get the prompt's KV from a prefill worker, or compute it here; never neither."""
        try:
            admitted = await call.admitted
            decision = self._decide(call, admitted)
            call.reason = decision.reason
            if decision.is_here:
                self._prefill_here(call, "local")
                return
            is_published = await handoffs.bring(call, admitted)
        except Exception as error:  # a bug here must end this request, visibly
            logger.exception("hand-off broke request_id=%s", call.request.request_id)
            call.fail(WorkerError(f"hand-off: {error!r}"))
            self._engine.cancel(call.number)
            return
        if not is_published:
            call.reason = Reason.FAILED
            self._prefill_here(call, "fallback")

    def _decide(self, call: Call, admitted: Admitted) -> Decision:
        num_tokens = len(call.token_ids)
        prompt = Prompt(num_tokens=num_tokens, num_missing=num_tokens - admitted.num_hit_tokens)
        return self._rule.decide(prompt, self._engine.load(), self._clock())

    def _prefill_here(self, call: Call, place: Place) -> None:
        """Compute what is missing of the prompt on this worker."""
        self._placed[place, call.reason] += 1
        call.prefilled_by = self._me.worker_id
        self._engine.prefill_here(call.number)

    def _on_published(self, call: Call) -> None:
        self._placed["remote", call.reason] += 1

    def _on_handoff_ended(self, call: Call, driver: asyncio.Task[None]) -> None:
        """Give the engine the word that an ended sequence's blocks wait for.

        A callback, since a task that is cancelled before its first step runs nothing of its own.
        """
        self._drivers.discard(driver)
        if not call.is_written_to:
            self._engine.fence(call.number)
