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
from deployments.channel.address import ChannelAddress
from deployments.channel.server import ChannelServer
from deployments.channel.stream import ChannelTimings
from deployments.handles import PrefillPool
from deployments.leaving import grace_of
from deployments.metrics import WorkerSnapshot, loop_sample, sample
from deployments.process import (
    at_own_address,
    deployment_secret,
    prepare_engine_process,
    spare_what_stays,
)
from deployments.worker_metrics import decode_samples
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
        self._worker = await asyncio.to_thread(
            build_decode_worker,
            settings,
            worker_id=f"decode-{context.rank.rank}",
            environ=os.environ,
            secret=secret,
            prefill=PrefillPool(prefill, secret=secret) if prefill is not None else None,
        )
        self._channel = ChannelServer(
            service=self._worker,
            worker=context.replica_id.unique_id,
            secret=secret,
            timings=ChannelTimings(),
        )
        await self._worker.start()
        channel = settings.channel
        self._address = await self._channel.start(channel.host, channel.port)
        spare_what_stays()

    async def channel_address(self) -> ChannelAddress:
        """Where Fronts find this worker."""
        return self._address

    async def snapshot(self) -> WorkerSnapshot:
        """This worker's share of `/metrics`."""
        return WorkerSnapshot(
            worker_id=self._worker.me.worker_id,
            role="decode",
            runner=self._worker.runner_choice,
            samples=(
                *decode_samples(self._worker),
                sample("baton_strangers_total", self._channel.num_strangers),
                loop_sample(),
            ),
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for policies that scale by it: it sees no request of ours itself."""
        load = self._worker.load()
        return {"ongoing_requests": load.requests, "waiting_requests": load.waiting}

    async def drain(self, timeout_s: float) -> None:
        """See `DecodeWorker.drain`; every request ends with a reply before the service goes."""
        await self._worker.drain(timeout_s=timeout_s)

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
