"""The decode pool as a Serve deployment: a process around a `DecodeWorker`, nothing more.

Requests come over the token channel and not through Serve, which starts, watches and replaces the
processes. So it is the replica itself that finishes what it has when Serve lets it go.
"""

from __future__ import annotations

import asyncio
import os

from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.schema import Settings
from deployments.call_gate import CallGate
from deployments.channel.server import ChannelServer
from deployments.channel.stream import ChannelTimings
from deployments.control_call import CHANNEL_ADDRESS, DRAIN, SNAPSHOT, ControlDoor
from deployments.handles import PrefillPool
from deployments.leaving import grace_of
from deployments.process import (
    at_own_address,
    deployment_secret,
    prepare_engine_process,
    spare_what_stays,
)
from deployments.worker_metrics import decode_snapshot
from workers.host import available_cores


class Decode:
    """One replica = one decode worker; without a prefill pool it prefills everything itself."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, prefill: DeploymentHandle | None = None
    ) -> None:
        prepare_engine_process(settings, cores=available_cores())
        # Imported here: torch takes seconds, and who builds the application does without.
        from workers.assembly import build_decode_worker

        settings = at_own_address(settings, os.environ)
        secret = deployment_secret(os.environ)
        context = serve.get_replica_context()
        self._grace_s = grace_of(context)
        self._worker = worker = await asyncio.to_thread(
            build_decode_worker,
            settings,
            worker_id=f"decode-{context.rank.rank}",
            environ=os.environ,
            secret=secret,
            prefill=PrefillPool(prefill, secret=secret) if prefill is not None else None,
        )
        self._channel = channel = ChannelServer(
            service=worker,
            worker=context.replica_id.unique_id,
            secret=secret,
            timings=ChannelTimings(),
        )
        await worker.start()
        address = await channel.start(settings.channel.host, settings.channel.port)
        gate = CallGate(secret)
        self._control = ControlDoor(
            gate,
            {
                CHANNEL_ADDRESS: lambda: address,
                SNAPSHOT: lambda: decode_snapshot(
                    worker, num_strangers=channel.num_strangers + gate.num_strangers
                ),
                DRAIN: lambda timeout_s: worker.drain(timeout_s=timeout_s),
            },
        )
        spare_what_stays()

    async def control(self, message: object) -> bytes:
        """See `ControlDoor.answer`; what comes may be anything that Serve can carry."""
        return await self._control.answer(message)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for policies that scale by it: it sees no request of ours itself."""
        load = self._worker.load()
        return {"ongoing_requests": load.requests, "waiting_requests": load.waiting}

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises."""
        if not self._worker.healthy:
            raise RuntimeError("the engine has stopped, or the transfer thread hangs")

    async def __del__(self) -> None:
        """Called by Serve when the replica is told to go: what runs has its time to finish.

        Fronts go on elsewhere with what has not finished then.
        """
        self._channel.leave()
        await self._worker.drain(timeout_s=self._grace_s)
        await self._channel.close()
