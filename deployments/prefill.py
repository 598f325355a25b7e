"""The prefill pool as a Serve deployment: a process around a `PrefillWorker`, nothing more.

A prompt's call lasts until its hand-off has ended, and Serve lets no replica go before its last
call, or kills it when its time is up: what would outlast that is revoked before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing

from ray import serve

from configs.schema import Settings
from deployments.call_gate import CallGate
from deployments.control_call import SNAPSHOT, ControlDoor
from deployments.leaving import grace_of, when_told_to_go
from deployments.prefill_call import PrefillDoor
from deployments.process import (
    at_own_address,
    deployment_secret,
    prepare_engine_process,
    spare_what_stays,
)
from deployments.worker_metrics import prefill_snapshot
from workers.host import available_cores


class Prefill:
    """One replica = one prefill worker."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_engine_process(settings, cores=available_cores())
        # Imported here: torch takes seconds, and who builds the application does without.
        from workers.assembly import build_prefill_worker

        context = serve.get_replica_context()
        self._grace_s = grace_of(context)
        self._leaving: asyncio.Task[None] | None = None
        secret = deployment_secret(os.environ)
        self._worker = worker = await asyncio.to_thread(
            build_prefill_worker,
            at_own_address(settings, os.environ),
            worker_id=f"prefill-{context.rank.rank}",
            environ=os.environ,
            secret=secret,
        )
        gate = CallGate(secret)
        self._door = PrefillDoor(worker.prefill, gate=gate)
        self._control = ControlDoor(
            gate,
            {SNAPSHOT: lambda: prefill_snapshot(worker, num_strangers=gate.num_strangers)},
        )
        await worker.start()
        when_told_to_go(self._leave)
        spare_what_stays()

    async def prefill(self, message: object) -> AsyncIterator[bytes]:
        """See `PrefillDoor.prefill`; what comes may be anything that Serve can carry."""
        async with aclosing(self._door.prefill(message)) as answers:
            async for answer in answers:
                yield answer

    async def control(self, message: object) -> bytes:
        """See `ControlDoor.answer`."""
        return await self._control.answer(message)

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises."""
        if not self._worker.healthy:
            raise RuntimeError("the engine has stopped, or the transfer thread hangs")

    async def __del__(self) -> None:
        """Called by Serve after the last call of a replica that was told to go."""
        await self._leave()

    def _leave(self) -> asyncio.Task[None]:
        """Finish what runs, once: decode workers take what is refused or revoked elsewhere."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._worker.drain(timeout_s=self._grace_s))
        return self._leaving
