"""The decode pool as a Serve deployment: a process around a `DecodeWorker`, nothing more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.schema import Settings
from deployments.handles import PrefillPool
from deployments.metrics import WorkerSnapshot, loop_sample
from deployments.process import prepare_engine_process
from deployments.worker_metrics import decode_samples
from workers.messages import GenerateRequest, Heartbeat, WorkerEvent


class Decode:
    """One replica = one decode worker; without a prefill pool it prefills everything itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, prefill: DeploymentHandle | None = None
    ) -> None:
        # Imported here: torch takes seconds, and who builds the application does without.
        from workers.assembly import build_decode_worker

        prepare_engine_process()
        context = serve.get_replica_context()
        self._replica = context.replica_id.unique_id
        worker_id = f"decode-{context.rank.rank}"
        self._worker = await asyncio.to_thread(
            build_decode_worker,
            settings,
            worker_id=worker_id,
            environ=os.environ,
            prefill=PrefillPool(prefill) if prefill is not None else None,
        )
        await self._worker.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[WorkerEvent]:
        """See `DecodeWorker.generate`; heartbeats name the replica as Serve's router knows it."""
        async for event in self._worker.generate(request):
            yield replace(event, worker=self._replica) if isinstance(event, Heartbeat) else event

    async def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._worker.healthy

    async def snapshot(self) -> WorkerSnapshot:
        """This worker's share of `/metrics`."""
        return WorkerSnapshot(
            worker_id=self._worker.me.worker_id,
            role="decode",
            samples=(*decode_samples(self._worker), loop_sample()),
        )

    async def drain(self, timeout_s: float) -> None:
        """See `DecodeWorker.drain`; every request ends with a reply before the service goes."""
        await self._worker.drain(timeout_s=timeout_s)

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises."""
        if not self._worker.healthy:
            raise RuntimeError("the engine has stopped")

    async def __del__(self) -> None:
        """Called by Serve when the replica is told to go."""
        await self._worker.stop()
