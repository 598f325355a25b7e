"""A local cluster as its user sees it: it serves, it hides from the network, it leaves nothing.

Each cluster is a process of its own, as under `baton serve`. There are three starts in all, for
each costs 10 to 30 s on two cores.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cluster.errors import InstanceBusyError
from deployments.cluster.instance import claim, clean
from deployments.cluster.listeners import Listener, listeners, wide_listeners
from deployments.cluster.processes import ProcessId, members, wait_until_ended

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.integration.dummy_app"


class Served:
    """A cluster in a process of its own, serving the dummy application."""

    def __init__(self, directory: Path, port: int, *flags: str) -> None:
        self.directory = directory
        self.port = port
        self.output: list[str] = []
        self.errors = directory.parent / f"{directory.name}.err"
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(directory), str(port), *flags],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # a process group, as a terminal gives to a command
            )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.strip())
            if line.startswith("ready: True"):
                return
        raise AssertionError(self.errors.read_text())

    @property
    def instance_id(self) -> str:
        return str(json.loads((self.directory / "instance.json").read_text())["instance_id"])

    def count(self, end: int) -> str:
        url = f"http://127.0.0.1:{self.port}/count?end={end}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return str(response.read().decode())

    def end(self, signal_number: int) -> int:
        self.process.send_signal(signal_number)
        return self.wait()

    def interrupt_group(self) -> int:
        """What Ctrl-C in a terminal does: every process of the group gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=30)
        if self.process.stdout is not None:
            self.output += self.process.stdout.read().split()
            self.process.stdout.close()
        return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def watchdog_of(served: Served) -> ProcessId:
    """The one process of the instance that waits for its parent rather than for work."""
    (found,) = (
        process
        for process in members(served.instance_id)
        if b"watch(" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    )
    return found


def listeners_with(port: int, *, of: Served) -> list[Listener]:
    """All listeners once the port is among them: for a moment, HAProxy may hand it to its next."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = listeners(of.process.pid)
        if port in {listener.port for listener in found}:
            return found
    raise AssertionError(f"nothing listens on {port}")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("cluster") / "first", free_port(), "fail-first")
    try:
        served.wait_until_ready()
        yield served
    finally:
        if served.process.poll() is None:
            served.end(signal.SIGTERM)


def test_streams_from_an_inner_deployment(first: Served) -> None:
    assert first.count(3) == "0\n1\n2\n"


def test_failed_deploy_is_told_in_a_sentence(first: Served) -> None:
    (failure,) = (line for line in first.output if line.startswith("failed:"))

    assert "deployment Counter of application dummy" in failure
    assert failure.endswith("ValueError: the dummy was told to fail")


def test_every_replica_answers_each_time_it_is_asked(first: Served) -> None:
    assert r"answers: [[b'\x02'], [b'\x03']]" in first.output


def test_nothing_listens_beyond_loopback(first: Served) -> None:
    found = listeners_with(first.port, of=first)

    assert len({listener.pid for listener in found}) >= 7  # gcs, raylet, agents, serve, haproxy
    assert wide_listeners(first.process.pid) == []


def test_owned_directory_is_refused_to_a_second(first: Served) -> None:
    with (
        pytest.raises(InstanceBusyError, match=str(first.process.pid)),
        claim(first.directory, host="127.0.0.1", port=first.port),
    ):
        pass


def test_killed_cluster_is_cleaned_and_its_neighbour_is_not(first: Served, tmp_path: Path) -> None:
    second = Served(tmp_path / "second", free_port())
    second.wait_until_ready()
    neighbours = members(first.instance_id)
    lost = members(second.instance_id)
    watchdog = watchdog_of(second)

    # without its watchdog, a killed owner leaves processes behind
    os.kill(watchdog.pid, signal.SIGSTOP)
    second.end(signal.SIGKILL)
    orphans = [process for process in lost if process.is_alive() and process != watchdog]
    assert orphans

    # the next owner of the directory ends them
    restarted = Served(second.directory, second.port)
    restarted.wait_until_ready()
    assert wait_until_ended(lost, timeout_s=0)
    assert restarted.count(2) == "0\n1\n"

    # with its watchdog, it leaves none
    lost = members(restarted.instance_id)
    restarted.end(signal.SIGKILL)
    assert wait_until_ended(lost, timeout_s=5)
    clean(restarted.directory)  # its files, which the next owner would remove

    assert all(process.is_alive() for process in neighbours)
    assert first.count(1) == "0\n"


def test_interrupted_cluster_leaves_no_process(first: Served) -> None:
    """Last in this file: it ends the cluster that the tests above share."""
    started = members(first.instance_id)
    assert len(started) >= 10

    began = time.monotonic()
    code = first.interrupt_group()

    assert code == 0
    assert first.output[-1] == "stopped"
    assert time.monotonic() - began < 10
    assert wait_until_ended(started, timeout_s=0)
    assert not (first.directory / "instance.json").exists()
    assert (first.directory / "logs" / "serve").is_dir()
