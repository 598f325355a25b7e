"""Front as a Serve deployment: the HTTP application over handles to the decode pool."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.schema import Settings
from deployments.call_gate import CallGate
from deployments.channel.address import ChannelAddress
from deployments.channel.pool import ChannelPool
from deployments.channel.stream import ChannelTimings
from deployments.control_call import (
    CHANNEL_ADDRESS,
    END_ALL,
    SNAPSHOT,
    STOP_RESUMING,
    ControlCall,
    ControlDoor,
)
from deployments.front_service import FrontService, FrontSettings, Sources
from deployments.handles import ask_all
from deployments.http_app import build_app
from deployments.metrics import FrontMetrics, WorkerSnapshot
from deployments.process import deployment_secret, log_to_stderr, spare_what_stays
from deployments.resume import ResumeConfig, ResumingBackend
from deployments.served_model import read_served_model
from deployments.version import installed_version
from kv_transfer.authentication import Secret
from router.agent_step import AgentStep
from router.fixed import FixedPolicy
from router.policy import Decision, Policy, drive

_ASK_TIMEOUT_S = 2.0
_LOCAL_POOL = "local"


class Routing:
    """A policy that asks nothing, as Front calls it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, agent_step: AgentStep) -> Decision:
        """The pool for an agent step."""
        return drive(self._policy.route(agent_step, {}))


@serve.ingress()
class Front:
    """One replica = one HTTP application; holds no state that another Front could miss."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, decode: DeploymentHandle, prefill: DeploymentHandle | None
    ) -> None:
        log_to_stderr()
        context = serve.get_replica_context()
        front_id = f"front-{context.rank.rank}"
        peers = [handle for handle in (decode, prefill) if handle is not None]
        if settings.http.front_replicas > 1:
            peers.append(serve.get_deployment_handle(context.deployment, context.app_name))
        secret = deployment_secret(os.environ)
        gate = CallGate(secret)
        metrics = FrontMetrics(front_id, num_strangers=lambda: gate.num_strangers)
        self._pool = ChannelPool(
            me=context.replica_id.unique_id,
            find=partial(_addresses, decode, secret=secret),
            secret=secret,
            timings=ChannelTimings(silence_s=settings.decode.silence_s),
            rng=random.Random(),
            clock=time.monotonic,
        )
        backend = ResumingBackend(
            self._pool,
            ResumeConfig(silence_s=settings.decode.silence_s),
            clock=time.monotonic,
            on_loss=lambda loss: metrics.attempt_lost(loss.value),
        )
        self._service = FrontService(
            models=[read_served_model(settings, os.environ)],
            backends={_LOCAL_POOL: backend},
            policy=Routing(FixedPolicy(_LOCAL_POOL)),
            settings=FrontSettings(
                version=installed_version(),
                keep_alive_s=settings.http.keep_alive_s,
                request_timeout_s=settings.http.request_timeout_s,
                max_body_bytes=settings.http.max_body_bytes,
                max_choices=settings.limits.max_choices,
                echoes_request_id=False,
            ),
            metrics=metrics,
            sources=Sources(clock=time.monotonic, wall_clock=time.time, rng=random.SystemRandom()),
            peer_snapshots=partial(_snapshots, peers, but=front_id, secret=secret),
        )
        self._control = ControlDoor(
            gate,
            {
                SNAPSHOT: self._service.snapshot,
                STOP_RESUMING: backend.stop_resuming,
                END_ALL: backend.end_all,
            },
        )
        self._pool.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        app = build_app(self._service)
        spare_what_stays()
        return app

    async def control(self, message: object) -> bytes:
        """See `ControlDoor.answer`; what comes may be anything that Serve can carry."""
        return await self._control.answer(message)

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica when it raises."""
        if not self._pool.is_watching:
            raise RuntimeError("Front has stopped looking for workers")

    async def __del__(self) -> None:
        """Called by Serve when the replica is told to go, after its last request."""
        await self._pool.close()


# Not methods of Front: Serve calls any of those by its name, for whoever has Ray's token.


async def _snapshots(
    peers: Sequence[DeploymentHandle], *, but: str, secret: Secret
) -> Sequence[WorkerSnapshot]:
    """All workers and the other Fronts, asked anew at each scrape, `but` this Front."""
    answers = await asyncio.gather(
        *(
            ask_all(handle, ControlCall(secret, SNAPSHOT), timeout_s=_ASK_TIMEOUT_S)
            for handle in peers
        )
    )
    snapshots = [snapshot for said in answers for snapshot in said.values()]
    return [snapshot for snapshot in snapshots if snapshot.worker_id != but]


async def _addresses(decode: DeploymentHandle, *, secret: Secret) -> Sequence[ChannelAddress]:
    """Where the decode workers that Serve knows of take channels."""
    call = ControlCall(secret, CHANNEL_ADDRESS)
    return list((await ask_all(decode, call, timeout_s=_ASK_TIMEOUT_S)).values())
