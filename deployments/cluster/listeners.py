"""Who listens wider than allowed, among all processes of an instance."""

import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import psutil

from deployments.cluster.processes import MARKER, members

LOOPBACK_HOSTS = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that takes connections or datagrams from others."""

    pid: int
    command: str
    host: str
    port: int
    protocol: str  # tcp, udp


def listeners(root_pid: int) -> list[Listener]:
    """All sockets on which a process, its descendants and their instances listen."""
    return [
        listener
        for pid in sorted(_process_tree(root_pid))
        for listener in _listeners_of_process(pid)
    ]


def wide_listeners(
    root_pid: int, allowed_hosts: Collection[str] = LOOPBACK_HOSTS
) -> list[Listener]:
    """Those that listen on an address that is neither loopback nor one of the allowed hosts.

    Processes that were handed to init are found by the marker of the instance that they belong
    to.
    """
    return [found for found in listeners(root_pid) if is_wide(found.host, allowed_hosts)]


def is_wide(host: str, allowed_hosts: Collection[str]) -> bool:
    """Whether others than this host and the allowed ones reach a socket bound to this address.

    An IPv4 address inside IPv6 (`::ffff:127.0.0.1`) counts as that IPv4 address.
    """
    address = _address(host)
    return not address.is_loopback and address not in {_address(h) for h in allowed_hosts}


def _process_tree(root_pid: int) -> set[int]:
    pids = {root_pid, *(child.pid for child in psutil.Process(root_pid).children(recursive=True))}
    instance_ids = {
        instance_id for pid in pids if (instance_id := _instance_of_process(pid)) is not None
    }
    if root_pid == os.getpid() and MARKER in os.environ:
        instance_ids.add(os.environ[MARKER])
    for instance_id in instance_ids:
        pids.update(process.pid for process in members(instance_id))
    return pids


def _instance_of_process(pid: int) -> str | None:
    try:
        return psutil.Process(pid).environ().get(MARKER)
    except psutil.Error:
        return None


def _listeners_of_process(pid: int) -> Iterator[Listener]:
    try:
        process = psutil.Process(pid)
        command = process.name()
        connections = process.net_connections(kind="inet")
    except psutil.NoSuchProcess:
        return
    for connection in connections:
        is_tcp = connection.type == socket.SOCK_STREAM
        is_listening = connection.status == psutil.CONN_LISTEN if is_tcp else not connection.raddr
        if is_listening and connection.laddr:
            yield Listener(
                pid=pid,
                command=command,
                host=connection.laddr.ip,
                port=connection.laddr.port,
                protocol="tcp" if is_tcp else "udp",
            )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
