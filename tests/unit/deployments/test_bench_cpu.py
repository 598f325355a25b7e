from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from deployments.bench.cpu import (
    CpuReading,
    CpuWatch,
    cpu_between,
    is_on_this_machine,
    server_pids,
)
from deployments.cluster.processes import MARKER
from tests.fakes.clock import FakeClock

LISTENER = """
import socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(server.getsockname()[1], child.pid, flush=True)
input()
child.communicate(b"\\n")
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def reading(at_s: float, servers: Mapping[str, float | None], **more: float) -> CpuReading:
    values = {"busy_s": 0.0, "own_s": 0.0, "all_servers_s": 0.0, **more}
    return CpuReading(at_s=at_s, servers_s=servers, **values)


def test_other_use_is_what_neither_this_process_nor_a_server_used() -> None:
    before = reading(10.0, {"A": 1.0, "B": 5.0}, busy_s=100.0, own_s=1.0, all_servers_s=6.0)
    after = reading(12.0, {"A": 3.0, "B": 5.0}, busy_s=103.0, own_s=1.5, all_servers_s=8.0)

    use = cpu_between(before, after)

    assert (use.own_cores, use.servers_cores) == (0.25, {"A": 1.0, "B": 0.0})
    assert use.other_cores == pytest.approx(0.25)


def test_one_server_under_two_names_is_counted_once() -> None:
    before = reading(0.0, {"A": 0.0, "B": 0.0})
    after = reading(1.0, {"A": 1.0, "B": 1.0}, busy_s=1.5, all_servers_s=1.0)

    assert cpu_between(before, after).other_cores == pytest.approx(0.5)


def test_other_use_is_unknown_with_a_servers_processes() -> None:
    before, after = reading(0.0, {"A": None}), reading(1.0, {"A": 1.0}, busy_s=1.0)

    use = cpu_between(before, after)

    assert (use.servers_cores, use.other_cores) == ({"A": None}, None)


def test_a_process_that_ended_makes_no_use_negative() -> None:
    before = reading(0.0, {"A": 5.0}, all_servers_s=5.0)
    after = reading(1.0, {"A": 1.0}, all_servers_s=1.0)

    use = cpu_between(before, after)

    assert (use.servers_cores, use.other_cores) == ({"A": 0.0}, 0.0)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:8", "127.8.8.8"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_on_this_machine(f"http://{host}")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_others_are_not(host: str) -> None:
    assert not is_on_this_machine(f"http://{host}")


@pytest.fixture
def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != MARKER}


@pytest.fixture
def listener(environ: dict[str, str]) -> Iterator[tuple[int, set[int]]]:
    """A listening process and its child: the port, and their ids."""
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        yield port, {process.pid, child}
        process.communicate("\n")


def test_a_servers_processes_are_its_listener_and_what_that_started(
    listener: tuple[int, set[int]],
) -> None:
    port, pids = listener

    assert server_pids(port) == pids


def test_a_marked_server_has_its_starter_too(environ: dict[str, str]) -> None:
    # As `baton serve`: the command is not marked, what it starts is.
    program = (
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {MARKER!r}: 'bench-test-{os.getpid()}'}}\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], env=env)\n"
    )
    command = [sys.executable, "-c", program, LISTENER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        pids = server_pids(port)
        process.communicate("\n")

    assert {process.pid, child} < pids
    assert len(pids) == 3


def test_a_port_that_nobody_listens_on_has_no_processes(
    listener: tuple[int, set[int]],
) -> None:
    watch = CpuWatch({"A": "http://127.0.0.1:1", "far": "http://192.0.2.1"}, FakeClock())

    assert server_pids(1) == set()
    assert watch.read().servers_s == {"A": None}


def test_a_watch_reads_servers_itself_and_the_machine(listener: tuple[int, set[int]]) -> None:
    port, _ = listener
    watch = CpuWatch(dict.fromkeys("AB", f"http://127.0.0.1:{port}"), FakeClock(3.0))

    found = watch.read()

    assert found.at_s == 3.0
    assert found.own_s > 0
    assert found.servers_s["A"] == found.servers_s["B"] == found.all_servers_s
    assert found.all_servers_s > 0
    assert found.busy_s >= found.own_s
