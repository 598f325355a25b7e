"""Ownership of a directory, and ending an instance's processes and nothing else. No Ray here."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.cluster.environment import FIXED, prepare_environment
from deployments.cluster.errors import (
    ClusterError,
    EnvironmentTooLateError,
    InstanceBusyError,
    PortInUseError,
)
from deployments.cluster.instance import claim
from deployments.cluster.listeners import is_wide, listeners
from deployments.cluster.processes import (
    MARKER,
    Watchdog,
    end_members,
    identify,
    members,
    wait_until_ended,
)

HOST = "127.0.0.1"
SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
# a shell that stays as parent of an unmarked child
PARENT = ["sh", "-c", f"env -u {MARKER} {sys.executable} -c 'import time; time.sleep(600)' & wait"]

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], instance_id: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, MARKER: instance_id}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for_line(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    process.stdout.readline()


def test_only_the_marked_processes_are_ended(spawn: Spawn) -> None:
    ours, other = spawn(SLEEP, "ours"), spawn(SLEEP, "other")
    wait_for_line(ours)
    wait_for_line(other)

    assert end_members("ours") == []

    assert ours.wait(timeout=5) != 0
    assert other.poll() is None
    assert [process.pid for process in members("other")] == [other.pid]


def test_children_without_the_marker_belong_to_their_parent(spawn: Spawn) -> None:
    parent = spawn(PARENT, "family")
    for _ in range(500):
        if len(found := members("family")) == 2:
            break
    else:
        pytest.fail("the child did not start")

    assert end_members("family") == []

    assert wait_until_ended(found, timeout_s=5)
    assert parent.wait(timeout=5) != 0


def test_watchdog_ends_the_instance_of_a_killed_owner(spawn: Spawn) -> None:
    orphan = spawn(SLEEP, "watched")
    wait_for_line(orphan)
    program = (
        "import os, signal; from deployments.cluster.processes import Watchdog; "
        "w = Watchdog('watched'); os.kill(os.getpid(), signal.SIGKILL)"
    )

    subprocess.run([sys.executable, "-c", program], check=False)

    assert orphan.wait(timeout=10) != 0


def test_stopped_watchdog_ends_nothing(spawn: Spawn) -> None:
    process = spawn(SLEEP, "spared")
    wait_for_line(process)
    watchdog = Watchdog("spared")
    identity = identify(watchdog.pid)

    watchdog.stop()

    assert identity is not None
    assert not identity.is_alive()
    assert process.poll() is None


def test_claimed_directory_is_refused_to_others_until_it_is_released(
    tmp_path: Path, port: int
) -> None:
    with (
        claim(tmp_path, host=HOST, port=port),
        pytest.raises(InstanceBusyError, match=f"pid {os.getpid()}"),
        claim(tmp_path, host=HOST, port=port),
    ):
        pass

    with claim(tmp_path, host=HOST, port=port) as again:
        assert again.runtime_dir.is_dir()
    assert not again.runtime_dir.exists()


def test_claim_ends_what_the_last_owner_left(tmp_path: Path, port: int, spawn: Spawn) -> None:
    left = spawn(SLEEP, "left")
    wait_for_line(left)
    foreign = tmp_path / "precious"
    foreign.mkdir()
    record = {"instance_id": "left", "runtime_dir": str(foreign), "pid": 1}
    (tmp_path / "instance.json").write_text(json.dumps(record))

    with claim(tmp_path, host=HOST, port=port) as instance:
        assert left.wait(timeout=5) != 0
        assert instance.instance_id != "left"

    assert foreign.is_dir()  # no name that we would give, so not ours to remove
    assert not (tmp_path / "instance.json").exists()


def test_record_that_is_none_is_reported(tmp_path: Path, port: int) -> None:
    (tmp_path / "instance.json").write_text("[]")

    with (
        pytest.raises(ClusterError, match="not the record of an instance"),
        claim(tmp_path, host=HOST, port=port),
    ):
        pass


def test_port_of_somebody_else_is_refused_and_named(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        taken = server.getsockname()[1]

        with (
            pytest.raises(PortInUseError, match=str(taken)),
            claim(tmp_path, host=HOST, port=taken),
        ):
            pass


def test_logs_of_the_last_run_are_kept(tmp_path: Path, port: int) -> None:
    with claim(tmp_path, host=HOST, port=port) as instance:
        logs = instance.ray_dir / "session_1" / "logs"
        logs.mkdir(parents=True)
        (instance.ray_dir / "session_latest").symlink_to(logs.parent)
        (logs / "gcs.out").write_text("started")
        assert (instance.logs_dir / "gcs.out").read_text() == "started"

    assert not instance.logs_dir.is_symlink()
    assert (instance.logs_dir / "gcs.out").read_text() == "started"


def test_neighbouring_instances_take_different_ports(tmp_path: Path, port: int) -> None:
    with (
        claim(tmp_path / "a", host=HOST, port=port) as one,
        claim(tmp_path / "b", host=HOST, port=port + 1) as two,
    ):
        assert one.ports != two.ports
        assert one.ports.first_replica < one.ports.last_replica


def test_environment_is_refused_once_ray_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", sys)

    with pytest.raises(EnvironmentTooLateError, match="RAY_SERVE_ENABLE_HA_PROXY"):
        prepare_environment({})
    prepare_environment(dict(FIXED))  # already as it should be


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("127.0.0.53", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.0.2.2", True),
    ],
)
def test_address_is_wide_unless_loopback_or_allowed(host: str, expected: bool) -> None:
    assert is_wide(host, ["127.0.0.1", "192.0.2.1"]) is expected


def test_listening_sockets_are_found_and_connections_are_not() -> None:
    with (
        socket.create_server((HOST, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind((HOST, 0))

        found = {(listener.protocol, listener.port) for listener in listeners(os.getpid())}

        assert ("tcp", server.getsockname()[1]) in found
        assert ("udp", datagrams.getsockname()[1]) in found
        assert ("tcp", client.getsockname()[1]) not in found
