"""`baton serve` as its user runs it: a process of its own, watched from outside.

Owns the process and finds its workers; what it serves is asked over HTTP alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import psutil

from configs.schema import HttpSettings, Settings
from deployments.cluster.processes import members, wait_until_ended
from deployments.serving import instance_directory
from tests.tools.scrape import Scrape, parse

__all__ = [
    "COLOCATED_SETTINGS",
    "MODEL",
    "WINDOW",
    "BatonServer",
    "Role",
    "baton_command",
    "free_port",
]

Role = Literal["Front", "Decode", "Prefill"]

MODEL = "smollm2-135m"
WINDOW = 2048
SETTINGS = (
    "model.dtype=fp32",  # so that a text does not depend on what else is in its batch
    f"model.max_model_len={WINDOW}",
    "decode.engine.pool_tokens=16384",
    "prefill.engine.pool_tokens=8192",
    "prefill.engine.prefill_chunk_tokens=128",  # many chunks in a long prompt: many to stop at
)
COLOCATED_SETTINGS = tuple(name for name in SETTINGS if not name.startswith("prefill."))
"""The same where there is no prefill worker."""
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1


def baton_command() -> str:
    """The console script of the environment that runs the tests."""
    return str(Path(sys.executable).parent / "baton")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatonServer:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    @contextmanager
    def started(
        cls,
        directory: Path,
        *,
        preset: str = "local",
        settings: Sequence[str] = SETTINGS,
        more: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Iterator[BatonServer]:
        """A server that is ready, with `more` settings and variables than the session's.

        At the end of the block none of its processes is left.
        """
        port = free_port()
        own = settings
        if settings is SETTINGS and preset == "colocated":
            own = COLOCATED_SETTINGS
        overrides = [word for setting in (*own, *more) for word in ("--set", setting)]
        command = [baton_command(), "serve", preset, "--port", str(port), *overrides]
        log = directory / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **(environ or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        server = cls(port=port, process=process, log=log)
        try:
            server.wait_until_ready()
        except BaseException:
            server.kill()
            raise
        try:
            yield server
        finally:
            server.stop()

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the command itself; every other process descends from it."""
        return self.process.pid

    @property
    def instance_id(self) -> str:
        """The marker that each of its processes carries."""
        return str(json.loads((self.directory / "instance.json").read_text())["instance_id"])

    @property
    def directory(self) -> Path:
        """What the instance keeps for its next start."""
        return instance_directory(Settings(http=HttpSettings(port=self.port)), os.environ)

    @property
    def ray_token(self) -> Path:
        """The file of the token by which its Ray knows its own."""
        record = json.loads((self.directory / "instance.json").read_text())
        return Path(record["runtime_dir"]) / "token"

    @property
    def ray_address(self) -> str:
        """Where its Ray is reached."""
        words = [word for process in self._descendants() for word in _title(process).split()]
        option = "--gcs-address="
        return next(word for word in words if word.startswith(option)).removeprefix(option)

    def wait_until_ready(self) -> None:
        """Return once it takes requests; AssertionError with its output if it does not start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if self._is_ready():
                return
            time.sleep(POLL_S)
        raise AssertionError(f"baton serve did not start:\n{self.log.read_text()}")

    def _is_ready(self) -> bool:
        """By its own word too: it answers a moment before, when SIGTERM would still end a start."""
        if "Ready after" not in self.log.read_text():
            return False
        try:
            return httpx.get(f"{self.base_url}/ready", timeout=10).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """End it by SIGTERM; AssertionError if it fails, or leaves a process behind."""
        if self.process.poll() is not None:
            raise AssertionError(f"baton serve ended before its time:\n{self.log.read_text()}")
        instance_id = self.instance_id
        processes = members(instance_id)
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("baton serve did not stop by SIGTERM") from None
        assert code == 0, self.log.read_text()
        assert wait_until_ended(processes, timeout_s=0), "processes outlived baton serve"
        assert members(instance_id) == []
        shutil.rmtree(self.directory)  # the next run has another port: nobody would find its logs

    def kill(self) -> None:
        """End the command without a word; its watchdog ends the rest."""
        self.process.kill()
        self.process.wait()

    def replica_pid(self, role: Role) -> int:
        """The process of the one replica of a deployment; LookupError while there is none."""
        found = self.replica_pids(role)
        if len(found) != 1:
            raise LookupError(f"{len(found)} processes are replicas of {role}")
        return found[0]

    def replica_pids(self, role: Role) -> list[int]:
        """The processes of all replicas of a deployment that are there now, in order."""
        title = f"ServeReplica:baton:{role}"
        return sorted(process.pid for process in self._descendants() if title in _title(process))

    def replicas(self) -> dict[Role, psutil.Process]:
        """The processes that serve requests."""
        roles: Sequence[Role] = ("Front", "Decode", "Prefill")
        return {role: psutil.Process(self.replica_pid(role)) for role in roles}

    def _descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def scrape(self) -> Scrape:
        """`/metrics` as it is now."""
        response = httpx.get(f"{self.base_url}/metrics", timeout=30)
        response.raise_for_status()
        return parse(response.text)

    def wait_for(
        self, condition: Callable[[Scrape], bool], *, timeout_s: float, what: str
    ) -> Scrape:
        """The first scrape that meets a condition; AssertionError if none does in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            scrape = self.scrape()
            if condition(scrape):
                return scrape
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{scrape.relevant()}")
            time.sleep(POLL_S)

    def wait_until_idle(self, *, timeout_s: float = 60.0) -> Scrape:
        """A scrape in which no request holds anything on any worker."""
        return self.wait_for(Scrape.is_idle, timeout_s=timeout_s, what="nothing is held")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has ended meanwhile
