"""Settings -> Serve application: which deployments there are and how they are wired. No logic.

`deployments.app:build` is the import path in every Serve config, `baton serve`'s and KubeRay's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from configs.schema import DecodeSettings, PrefillSettings, Settings
from deployments.decode import Decode
from deployments.front import Front
from deployments.prefill import Prefill

_ONGOING_PER_FRONT = 1024
_CPUS_PER_REPLICA = 0.1
"""What Ray books, not what is used: threads are planned by `workers.planning`."""
_DRAIN_TIMEOUT_S = 5
_DRAIN_POLL_S = 0.1
"""Between two looks at whether a stopping replica still has requests."""
_HEALTH_PERIOD_S = 2
_HEALTH_TIMEOUT_S = 20
"""Longer than the longest step, which may hold the interpreter up."""


class AppArgs(BaseModel):
    """The `args` of the application in a Serve config."""

    model_config = ConfigDict(extra="forbid")

    settings: Settings = Settings()


def build(args: Mapping[str, Any]) -> Application:
    """Front -> Decode -> Prefill, or Front -> Decode where there is no prefill pool.

    `args` has the shape of `AppArgs`; unknown keys and wrong values are errors.
    """
    settings = AppArgs.model_validate(args).settings
    prefill = _prefill(settings)
    decode = _deployment(Decode, settings, settings.decode).bind(settings, prefill)
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=settings.http.front_replicas,
        max_ongoing_requests=_ONGOING_PER_FRONT,
        ray_actor_options={"num_cpus": _CPUS_PER_REPLICA},
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=_DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
    )
    return front.bind(settings, decode, prefill)


def _prefill(settings: Settings) -> Application | None:
    pool = settings.prefill
    if pool is None:
        return None
    return _deployment(Prefill, settings, pool).bind(settings)


def _deployment(target: Any, settings: Settings, pool: DecodeSettings | PrefillSettings) -> Any:
    """A pool of engines; its queue is the engine's own, so Serve's is set above it."""
    engine = pool.engine
    return serve.deployment(
        target,
        name=target.__name__,
        num_replicas=pool.replicas,
        max_ongoing_requests=engine.max_sequences + engine.queue_limit + _ONGOING_PER_FRONT,
        # No runtime environment: it would keep Ray from using the process that it started ahead.
        ray_actor_options={
            "num_cpus": _CPUS_PER_REPLICA,
            # Of none booked, Ray hides every GPU from a replica.
            "num_gpus": engine.gpu_share if settings.model.device == "cuda" else 0,
        },
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
    )
