"""Whose process is whose, and ending exactly those.

Every process of an instance carries `BATON_INSTANCE=<id>` in its environment, inherited from the
one that started Ray, so it is found again after its parent is gone and it was handed to init. A
process is never picked by its name, and one that took over a pid is told apart by its start time.

Standard library only: the watchdog runs this file in an interpreter without site packages, which
keeps its memory near that of an empty Python.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MARKER = "BATON_INSTANCE"
POLL_S = 0.02
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process that stays itself: pids are reused, a pid with its start time is not."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        stat = _read_stat(self.pid)
        return stat is not None and stat.identity == self and stat.state not in "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    identity: ProcessId
    state: str
    parent_pid: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # the command name stands in parentheses and may hold spaces and parentheses itself
    fields = text.rpartition(")")[2].split()
    identity = ProcessId(pid=pid, start_ticks=int(fields[19]))
    return _Stat(identity=identity, state=fields[0], parent_pid=int(fields[1]))


def _has_marker(pid: int, entry: bytes) -> bool:
    try:
        return entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile, or is another user's
        return False


def identify(pid: int) -> ProcessId | None:
    """The lasting identity of a running process, or None if there is no such process."""
    stat = _read_stat(pid)
    return None if stat is None else stat.identity


def members(instance_id: str) -> list[ProcessId]:
    """Every live process of an instance: those with its marker and all that these started.

    The caller itself is never among them, even where it carries the marker.
    """
    entry = f"{MARKER}={instance_id}".encode()
    stats = [
        stat
        for name in os.listdir(_PROC)
        if name.isdigit() and (stat := _read_stat(int(name))) is not None
    ]
    found = {stat.identity.pid for stat in stats if _has_marker(stat.identity.pid, entry)}
    found.discard(os.getpid())
    while True:
        children = {s.identity.pid for s in stats if s.parent_pid in found} - found - {os.getpid()}
        if not children:
            break
        found |= children
    return [s.identity for s in stats if s.identity.pid in found and s.state not in "ZX"]


def _send(process: ProcessId, signal_number: int) -> None:
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def end_members(instance_id: str, *, timeout_s: float = 5.0) -> list[ProcessId]:
    """Kill every process of an instance; return those that still live at the timeout.

    Killed rather than asked: this runs when the owner is gone or has already asked. It looks
    again until nothing is found, since a process may start another one while it dies.
    """
    deadline = time.monotonic() + timeout_s
    while remaining := members(instance_id):
        for process in remaining:
            _send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return remaining
        time.sleep(POLL_S)
    return []


def wait_until_ended(processes: Iterable[ProcessId], *, timeout_s: float) -> bool:
    """Whether all of them have ended within the timeout."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


class Watchdog:
    """A small process that ends the instance when its owner is killed without a word.

    It waits for the end of a pipe whose other end only the owner holds, so it needs no polling
    and cannot be early. It has a session of its own: Ctrl-C in the terminal does not reach it.
    """

    def __init__(self, instance_id: str) -> None:
        root = str(Path(__file__).resolve().parents[2])
        program = (
            f"import sys; sys.path.insert(0, {root!r}); "
            f"from deployments.cluster.processes import watch; watch({instance_id!r})"
        )
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # marked as well: should it hang, the next owner ends it with the rest
            env={**os.environ, MARKER: instance_id},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The watchdog's process id."""
        return self._process.pid

    def stop(self) -> None:
        """End the watchdog without it ending anything; harmless where it has ended."""
        self._process.kill()
        self._process.wait()
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            stdin.close()


def watch(instance_id: str) -> None:
    """Wait until the owner closes our standard input by ending, then end the instance."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_members(instance_id)
