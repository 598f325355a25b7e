"""What else used the CPU while something was measured: a timing beside other jobs is worth little.

Other use is the machine's busy time less that of this process and of the servers' processes. It is
known only where every server on this machine has a listener whose processes can be found.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import httpx
import psutil

from deployments.cluster.processes import MARKER, members

__all__ = ["CpuReading", "CpuUse", "CpuWatch", "cpu_between", "is_on_this_machine", "server_pids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """CPU seconds so far."""

    at_s: float
    busy_s: float
    """Of the whole machine, time stolen by its host included."""
    own_s: float
    servers_s: Mapping[str, float | None]
    """By server; None where its processes are not known. Servers elsewhere are not in it."""
    all_servers_s: float
    """Of the known ones, each process counted once: two names may mean one server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Cores that were busy on average between two readings."""

    own_cores: float
    servers_cores: Mapping[str, float | None]
    other_cores: float | None
    """None: not known, since a server's processes are not."""


def cpu_between(before: CpuReading, after: CpuReading) -> CpuUse:
    """The use between two readings of the same servers."""
    wall_s = after.at_s - before.at_s

    def cores(seconds: float) -> float:
        # Below 0 where a process ended in between, since its seconds are gone with it.
        return max(0.0, seconds) / wall_s

    servers: dict[str, float | None] = {}
    for name, end_s in after.servers_s.items():
        start_s = before.servers_s[name]
        servers[name] = None if start_s is None or end_s is None else cores(end_s - start_s)
    own = cores(after.own_s - before.own_s)
    serving = cores(after.all_servers_s - before.all_servers_s)
    other = cores(after.busy_s - before.busy_s) - own - serving
    return CpuUse(
        own_cores=own,
        servers_cores=servers,
        other_cores=None if None in servers.values() else max(0.0, other),
    )


class CpuWatch:
    """Reads the CPU times of this machine, this process and the servers at some addresses."""

    def __init__(self, servers: Mapping[str, str], now: Callable[[], float]) -> None:
        """`servers` are addresses by the name that the report gives them."""
        self._local = {
            name: address for name, address in servers.items() if is_on_this_machine(address)
        }
        self._now = now

    def read(self) -> CpuReading:
        """The times so far; looks for the servers' processes anew, since they come and go."""
        pids = {name: _pids_at(address) for name, address in self._local.items()}
        return CpuReading(
            at_s=self._now(),
            busy_s=_machine_busy_s(),
            own_s=_process_s(os.getpid()),
            servers_s={name: _processes_s(some) if some else None for name, some in pids.items()},
            all_servers_s=_processes_s(set().union(*pids.values())),
        )


def is_on_this_machine(address: str) -> bool:
    """Whether a URL's host is this machine; False where the name is not known."""
    host = httpx.URL(address).host
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return any(ip in own or ipaddress.ip_address(ip).is_loopback for ip in found)


def server_pids(port: int) -> set[int]:
    """Processes of the server that listens on a port of this machine; empty where not known.

    The listeners and all that they started; of a Baton server every process of its instance, and
    the command that started it.
    """
    pids = {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.pid is not None
    }
    pids |= {child for pid in pids for child in _descendants(pid)}
    for instance_id in {found for pid in pids if (found := _instance_of(pid)) is not None}:
        pids |= _instance_pids(instance_id)
    return pids - {os.getpid()}


def _instance_pids(instance_id: str) -> set[int]:
    pids = {member.pid for member in members(instance_id)}
    starters = {parent for pid in pids if (parent := _parent_of(pid)) is not None}
    # The starter carries no mark. Whoever started this process too is a shell, not the server.
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return pids | (starters - ours)


def _pids_at(address: str) -> set[int]:
    url = httpx.URL(address)
    return server_pids(url.port or (443 if url.scheme == "https" else 80))


def _processes_s(pids: Iterable[int]) -> float:
    return sum(map(_process_s, pids))


def _process_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _instance_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).environ().get(MARKER)
    except psutil.Error:
        return None


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is inside user's already.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)
