"""A Ray cluster with Serve on this host, for the time of a `with` block."""

import contextlib
import http.client
import importlib
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from deployments.cluster.environment import instance_environment, prepare_environment
from deployments.cluster.errors import ClusterDiedError, ClusterError, DeployError, ServeConfigError
from deployments.cluster.haproxy import write_launcher
from deployments.cluster.instance import Instance, claim
from kv_transfer.authentication import Secret

POLL_S = 0.2
# Replicas that still answer get this long at the end; what remains after it is killed.
SERVE_SHUTDOWN_S = 3.0
_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Interrupt)\b.*")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """One deployment of an application."""

    name: str
    status: str
    num_running: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationState:
    """One application and its deployments."""

    name: str
    status: str
    message: str
    deployments: tuple[DeploymentState, ...]

    @property
    def is_running(self) -> bool:
        """Whether every deployment has the replicas it asked for."""
        return self.status == "RUNNING"

    @property
    def has_failed(self) -> bool:
        """Whether it will not come up by waiting."""
        return self.status in ("DEPLOY_FAILED", "UNHEALTHY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What runs, and where to reach it."""

    url: str
    applications: tuple[ApplicationState, ...]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to reach and all of it runs."""
        return bool(self.applications) and all(a.is_running for a in self.applications)


class LocalCluster:
    """Ray and Serve on this host, closed to the network, for as long as a `with` block lasts.

    Use it in the main thread. The block may end in any way, Ctrl-C and SIGTERM included: no process
    that was started stays. If this process is killed outright, a watchdog ends them; if that is
    killed too, the next cluster with the same directory does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        secret: Secret,
    ) -> None:
        """Nothing starts yet; `secret` is what the processes know each other by."""
        self._directory = directory
        self._host = host
        self._port = port
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._secret = secret
        self._resources = ExitStack()
        self._ray_node: Any = None
        self._client: Any = None
        self._instance: Instance | None = None

    @property
    def url(self) -> str:
        """Where clients on this host reach the applications."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{host}:{self._port}"

    @property
    def instance(self) -> Instance:
        """The claimed directory; an error before `start`."""
        if self._instance is None:
            raise ClusterError("the cluster is not started")
        return self._instance

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start Ray; Serve follows with the first `deploy`."""
        prepare_environment()
        with ExitStack() as starting:
            starting.enter_context(_handling({signal.SIGTERM: _exit_on_signal}))
            instance = starting.enter_context(
                claim(self._directory, host=self._host, port=self._port)
            )
            # only now may ray be imported: it and Serve read the environment at import
            self._ray_node = importlib.import_module("deployments.cluster.ray_node")
            self._prepare(instance, starting)
            starting.callback(self._ray_node.stop_ray)
            self._ray_node.start_ray(
                temp_dir=instance.ray_dir, num_cpus=self._num_cpus, num_gpus=self._num_gpus
            )
            # Ray has put its own handler for SIGTERM in place meanwhile
            starting.enter_context(_handling({signal.SIGTERM: _exit_on_signal}))
            self._instance = instance
            self._resources = starting.pop_all()
        logger.info("cluster started directory=%s", self._directory)

    def _prepare(self, instance: Instance, starting: ExitStack) -> None:
        launcher = instance.runtime_dir / "haproxy"
        write_launcher(launcher, host=self._host, binary=self._ray_node.haproxy_binary())
        token = instance.runtime_dir / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = instance_environment(
            instance_id=instance.instance_id,
            runtime_dir=instance.runtime_dir,
            ports=instance.ports,
            launcher=launcher,
            token=token,
            secret=self._secret,
            python_path=os.environ.get("PYTHONPATH", ""),
        )
        starting.enter_context(_environment(environment))

    def run(self, name: str, application: Any, *, timeout_s: float) -> None:
        """Deploy a `ray.serve.Application` at `/`, and wait until it runs and is reachable.

        It was built in this process. From a config Serve would build it in a worker of its own,
        which takes the whole start of one more process. Raises as `deploy`.
        """
        deadline = time.monotonic() + timeout_s
        self._serve_by({"applications": []})
        self._ray_node.run(self._client, name, application)
        self._wait_until_running({name}, deadline)
        self._wait_until_reachable(deadline)

    def deploy(self, config: Mapping[str, Any], *, timeout_s: float) -> None:
        """Deploy a Serve config, as KubeRay does; wait until all of it runs and is reachable.

        Raises ServeConfigError for a key or value that Serve would not follow, DeployError when
        an application fails or is not running in time.
        """
        deadline = time.monotonic() + timeout_s
        schema = self._serve_by(config)
        self._client.deploy_apps(schema, _blocking=False)
        names = {application.name for application in schema.applications}
        self._wait_until_running(names, deadline)
        if names:
            self._wait_until_reachable(deadline)

    def _serve_by(self, config: Mapping[str, Any]) -> Any:
        """The config as Serve's model; Serve runs afterwards."""
        _ = self.instance
        # as in start: imports ray
        parse = importlib.import_module("deployments.cluster.serve_config").parse_serve_config
        schema = parse(config)
        if config.get("http_options"):
            raise ServeConfigError("http_options are this cluster's own: give it host and port")
        if self._client is None:
            self._client = self._ray_node.start_serve(schema, port=self._port)
        return schema

    def _wait_until_running(self, names: set[str], deadline: float) -> None:
        while True:
            applications = [a for a in self.status().applications if a.name in names]
            for application in applications:
                if application.has_failed:
                    raise DeployError(_describe_failure(application))
            if len(applications) == len(names) and all(a.is_running for a in applications):
                return
            if time.monotonic() > deadline:
                waiting = (_describe_failure(a) for a in applications if not a.is_running)
                raise DeployError("not running in time: " + "; ".join(waiting))
            time.sleep(POLL_S)

    def _wait_until_reachable(self, deadline: float) -> None:
        """Wait for HAProxy, which learns of replicas a moment after the controller does."""
        while not self._answers():
            if time.monotonic() > deadline:
                raise DeployError(f"the applications run but nothing answers at {self.url}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=2)
        try:
            connection.request("GET", "/-/healthz")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def status(self) -> ClusterStatus:
        """What runs now, by Serve's word; it may lag by a control loop (0.1 s)."""
        if self._client is None:
            return ClusterStatus(url=self.url, applications=())
        applications = self._ray_node.serve_status().applications
        return ClusterStatus(
            url=self.url,
            applications=tuple(_application_state(n, a) for n, a in applications.items()),
        )

    def ask_all(
        self,
        application: str,
        deployment: str,
        method: str,
        message: bytes,
        *,
        timeout_s: float,
        suffices: Callable[[Sequence[object]], bool] = lambda _: False,
    ) -> list[object]:
        """What every replica of a deployment answers to a method of bytes.

        Without those that fail or are late, and those that are slower than answers that suffice;
        nothing of it was unpickled here.
        """
        answers: list[object] = self._ray_node.ask_all_replicas(
            application, deployment, method, message, timeout_s=timeout_s, suffices=suffices
        )
        return answers

    def wait(self) -> None:
        """Block until SIGINT or SIGTERM, then return; ClusterDiedError if Ray ends before."""
        try:
            while self._ray_node.is_alive():
                time.sleep(1)
        except (KeyboardInterrupt, SystemExit):
            return
        raise ClusterDiedError(
            f"a process of Ray has ended; its logs are in {self.instance.logs_dir}"
        )

    def stop(self) -> None:
        """End everything that was started, within a few seconds; again and again if you like."""
        # a second Ctrl-C must not leave half of it running; each part below is bounded in time
        with _handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
            client, self._client = self._client, None
            if client is not None:
                self._stop_serve(client)
            self._resources.close()
            self._instance = None

    def _stop_serve(self, client: Any) -> None:
        try:
            self._ray_node.stop_serve(client, timeout_s=SERVE_SHUTDOWN_S)
        except Exception:
            logger.info("serve did not shut down by itself", exc_info=True)


def _application_state(name: str, application: Any) -> ApplicationState:
    return ApplicationState(
        name=name,
        status=str(application.status.value),
        message=application.message,
        deployments=tuple(
            DeploymentState(
                name=deployment_name,
                status=str(deployment.status.value),
                num_running=deployment.replica_states.get("RUNNING", 0),
                message=deployment.message,
            )
            for deployment_name, deployment in application.deployments.items()
        ),
    )


def _describe_failure(application: ApplicationState) -> str:
    """One sentence: which deployment of the application, in which state, and the cause."""
    for deployment in application.deployments:
        if deployment.status not in ("HEALTHY", "RUNNING"):
            return (
                f"deployment {deployment.name} of application {application.name} is "
                f"{deployment.status}: {cause(deployment.message)}"
            )
    return f"application {application.name} is {application.status}: {cause(application.message)}"


def cause(message: str) -> str:
    """The line of a message with tracebacks that says what went wrong: its last error."""
    lines = [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines or ["no reason given"])[-1]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which its children inherit, for the time of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle signals in this way for the time of a block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    """Let SIGTERM unwind the stack, as Ctrl-C does, so that blocks end properly."""
    raise SystemExit(128 + number)
