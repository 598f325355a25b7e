"""`baton serve`: from settings to a running service on this host, and back to nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from configs.schema import Settings
from deployments.cluster.errors import ClusterError
from deployments.cluster.local import LocalCluster
from deployments.terminal.check import plan_for_host
from workers.models.store import default_cache_dir
from workers.planning import enforce

__all__ = ["instance_directory", "serve", "serve_config"]

_DEPLOY_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 30.0
_POLL_S = 0.1


def serve(settings: Settings) -> None:
    """Start everything, say when it is ready, and stop everything at Ctrl-C or SIGTERM.

    Raises what the plan's checks raise before anything is started, and `ClusterError` where Ray or
    a deployment does not come up.
    """
    started = time.monotonic()
    plan = plan_for_host(settings, os.environ)
    enforce(plan.checks)
    workers = " + ".join(
        f"{worker.replicas} {worker.role} ({worker.pool_tokens} tokens of KV each)"
        for worker in plan.workers
    )
    _say(f"Serving {settings.model.served_name} with {workers}; starting Ray ...")
    directory = instance_directory(settings, os.environ)
    with LocalCluster(directory, host=settings.http.host, port=settings.http.port) as cluster:
        cluster.deploy(serve_config(settings), timeout_s=_DEPLOY_TIMEOUT_S)
        _wait_until_ready(cluster.url)
        _say(_welcome(cluster.url, settings.model.served_name, time.monotonic() - started))
        cluster.wait()
        _say("Stopping ...")
    _say("Stopped.")


def serve_config(settings: Settings) -> dict[str, Any]:
    """The Serve config of these settings, as KubeRay would be given it too."""
    return {
        "http_options": {"host": settings.http.host, "port": settings.http.port},
        "applications": [
            {
                "name": "baton",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": {"settings": settings.model_dump(mode="json")},
            }
        ],
    }


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


def _welcome(url: str, model: str, seconds: float) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"Ready after {seconds:.1f} s at {url} (metrics: {url}/metrics). Try:\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        "Ctrl-C stops everything that was started here."
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
