"""The prefill pool as a Serve deployment: a process around a `PrefillWorker`, nothing more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from ray import serve

from configs.schema import Settings
from deployments.metrics import WorkerSnapshot, loop_sample
from deployments.process import at_own_address, deployment_secret, prepare_engine_process
from deployments.worker_metrics import prefill_samples
from workers.host import available_cores
from workers.messages import PrefillEvent, PrefillRequest


class Prefill:
    """One replica = one prefill worker."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_engine_process(settings, cores=available_cores())
        # Imported here: torch takes seconds, and who builds the application does without.
        from workers.assembly import build_prefill_worker

        worker_id = f"prefill-{serve.get_replica_context().rank.rank}"
        self._worker = await asyncio.to_thread(
            build_prefill_worker,
            at_own_address(settings, os.environ),
            worker_id=worker_id,
            environ=os.environ,
            secret=deployment_secret(os.environ),
        )
        await self._worker.start()

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """See `PrefillWorker.prefill`."""
        async for event in self._worker.prefill(request):
            yield event

    async def snapshot(self) -> WorkerSnapshot:
        """This worker's share of `/metrics`."""
        return WorkerSnapshot(
            worker_id=self._worker.me.worker_id,
            role="prefill",
            samples=(*prefill_samples(self._worker), loop_sample()),
        )

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises."""
        if not self._worker.healthy:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        """Called by Serve when the replica is told to go."""
        await self._worker.stop()
