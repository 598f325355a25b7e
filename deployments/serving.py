"""`baton serve`: from settings to a running service on this host, and back to nothing."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from configs.schema import Settings
from deployments.cluster.errors import ClusterError
from deployments.cluster.local import LocalCluster
from deployments.control_call import (
    CONTROL,
    DRAIN,
    END_ALL,
    INTRODUCE,
    STOP_RESUMING,
    ControlCall,
    Method,
)
from deployments.secret import read_secret
from deployments.terminal.check import plan_for_host
from kv_transfer.authentication import Secret
from workers.checks import enforce
from workers.models.store import default_cache_dir

logger = logging.getLogger(__name__)

APP_NAME = "baton"

__all__ = ["instance_directory", "serve"]

_DEPLOY_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 30.0
_POLL_S = 0.1
_DRAIN_S = 5.0
"""What is still running after it ends with an error that its client sees."""
_DRAIN_MARGIN_S = 5.0
_FRONT_TIMEOUT_S = 2.0
_INTRODUCE_TIMEOUT_S = 2.0
_LAST_REPLIES_S = 0.3
"""From Front's last word to the clients: HAProxy passes it on in milliseconds."""


def serve(settings: Settings) -> None:
    """Start everything, say when it is ready, and stop everything at Ctrl-C or SIGTERM.

    Raises what the plan's checks and the secret raise before anything is started, and
    `ClusterError` where Ray or a deployment does not come up.
    """
    started = time.monotonic()
    secret = read_secret(os.environ) or Secret.fresh()
    plan = plan_for_host(settings, os.environ)
    enforce(plan.checks)
    workers = " + ".join(
        f"{worker.replicas} {worker.role} ({worker.pool_tokens} tokens of KV each)"
        for worker in plan.workers
    )
    _say(f"Serving {settings.model.served_name} with {workers}; starting Ray ...")
    directory = instance_directory(settings, os.environ)
    with (
        LocalCluster(
            directory, host=settings.http.host, port=settings.http.port, secret=secret
        ) as cluster,
        _draining(cluster, secret),
    ):
        build = importlib.import_module("deployments.app").build  # imports ray, as the cluster did
        application = build({"settings": settings.model_dump(mode="json")})
        cluster.run(APP_NAME, application, timeout_s=_DEPLOY_TIMEOUT_S)
        _wait_until_ready(cluster.url)
        _say(_welcome(cluster.url, settings.model.served_name, time.monotonic() - started))
        cluster.wait()
    _say("Stopped.")


def instance_directory(settings: Settings, environ: Mapping[str, str]) -> Path:
    """Where an instance keeps what its next start must find: one directory for each address."""
    address = f"{settings.http.host}-{settings.http.port}".replace(":", "_")
    return default_cache_dir(environ) / "run" / address


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass  # the proxy learns of a replica a moment after the controller does
        time.sleep(_POLL_S)
    raise ClusterError(f"{url}/ready did not answer 200 within {_READY_TIMEOUT_S:g} s")


@contextlib.contextmanager
def _draining(cluster: LocalCluster, secret: Secret) -> Iterator[None]:
    """At the end, have every request end with a reply, while there is a way back for it."""
    try:
        yield
    finally:
        running = _running(cluster)
        if running.get("Front"):
            _say(f"Stopping; running requests have {_DRAIN_S:g} s to finish ...")
            _drain(
                *(
                    _Deployment(cluster, name, secret, num_replicas=running.get(name, 0))
                    for name in ("Front", "Decode")
                )
            )


def _running(cluster: LocalCluster) -> Mapping[str, int]:
    """How many replicas each deployment has that run."""
    deployments = [item for app in cluster.status().applications for item in app.deployments]
    return {item.name: item.num_running for item in deployments}


def _drain(fronts: _Deployment, workers: _Deployment) -> None:
    """Fronts first: to one that knows nothing, a worker that stops is one to wait for again.

    And Fronts last: what has no worker, or one that does not drain, hears of nobody else.
    """
    fronts.tell(STOP_RESUMING, timeout_s=_FRONT_TIMEOUT_S)
    workers.tell(DRAIN, _DRAIN_S, timeout_s=_DRAIN_S + _DRAIN_MARGIN_S)
    fronts.tell(END_ALL, timeout_s=_FRONT_TIMEOUT_S)
    time.sleep(_LAST_REPLIES_S)


@dataclass(slots=True)
class _Deployment:
    """All replicas of one deployment, and the processes of them that know the secret."""

    cluster: LocalCluster
    name: str
    secret: Secret
    num_replicas: int
    present: frozenset[str] = frozenset()

    def tell(self, method: Method[None], *arguments: float, timeout_s: float) -> None:
        """Have all that know the secret do something; who does not is counted in the log.

        A replica that does not say who it is, is told nothing, and nobody waits for it.
        """
        done: Collection[str] = ()
        try:
            if len(self.present) < self.num_replicas:
                self.present |= self._ask(ControlCall(self.secret, INTRODUCE), _INTRODUCE_TIMEOUT_S)
            if self.present:
                call = ControlCall(self.secret, method, *arguments, meant_for=self.present)
                done = self._ask(call, timeout_s, of=self.present)
        except Exception as error:  # noqa: BLE001  # no failure may keep the service from stopping
            logger.warning("%s.%s failed error=%r", self.name, method.name, error)
        if len(done) < self.num_replicas:
            numbers = (len(done), self.num_replicas)
            logger.warning("%s.%s done by %d of %d replicas", self.name, method.name, *numbers)

    def _ask(
        self, call: ControlCall[None], timeout_s: float, *, of: Collection[str] = ()
    ) -> frozenset[str]:
        """The processes that answer: all of them, or no more than those that are named."""
        answers = self.cluster.ask_all(
            APP_NAME,
            self.name,
            CONTROL,
            call.message,
            timeout_s=timeout_s,
            suffices=lambda heard: bool(of) and call.is_answered_by(of, heard),
        )
        return frozenset(call.open_all(answers))


def _welcome(url: str, model: str, seconds: float) -> str:
    message = '{"role": "user", "content": "What is 2+2?"}'
    body = f'{{"model": "{model}", "messages": [{message}], "temperature": 0}}'
    return (
        f"Ready after {seconds:.1f} s at {url} (metrics: {url}/metrics). Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        "Ctrl-C stops everything that was started here."
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
