"""Two hosts on one machine: network namespaces with a link between them that can be cut.

A network namespace is a thread's. Sender and receiver have a transfer thread each, in which all
their sockets are made: so whole workers of one process can be on two hosts, as far as KV goes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    FetchSession,
    GrantAuthority,
    Transport,
)

_CLONE_NEWNET = 0x40000000


class CannotMakeHostsError(Exception):
    """This machine lets us make no network namespaces; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace and its end of the link."""

    name: str
    device: str
    address: str

    def enter(self) -> None:
        """Be on this host from now on: sockets that this thread makes are."""
        assert threading.current_thread() is not threading.main_thread(), "no way back"
        descriptor = os.open(Path("/run/netns") / self.name, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        finally:
            os.close(descriptor)

    def set_link(self, state: str) -> None:
        """This end `up` or `down`."""
        _ip("-n", self.name, "link", "set", self.device, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    """Where prefill is, and where decode."""

    prefill: Host
    decode: Host

    def cut(self, end: int = 0) -> None:
        """Nothing crosses any more, and nobody is told: by prefill's end of the link, or decode's.

        What is on its way stays in the senders' buffers, and crosses once the link is healed.
        """
        (self.prefill, self.decode)[end].set_link("down")

    def heal(self) -> None:
        """Both ends are up."""
        for host in (self.prefill, self.decode):
            host.set_link("up")


class AcrossHosts:
    """A `Transport` whose servers are on prefill's host, and whose sessions are opened on decode's.

    Give both sides the same one.
    """

    def __init__(self, make: Callable[[str], Transport], hosts: TwoHosts) -> None:
        """`make` makes the transport of the host with that address."""
        self._prefill, self._decode = make(hosts.prefill.address), make(hosts.decode.address)
        self.name = self._decode.name
        self.capabilities = self._decode.capabilities
        self._hosts = hosts

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        return _ServerOn(self._hosts.prefill, self._prefill.server(memory, authority, me))

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        self._hosts.decode.enter()
        return await self._decode.connect(memory, peer, key, me)

    async def close(self) -> None:
        await self._decode.close()
        await self._prefill.close()


class _ServerOn:
    def __init__(self, host: Host, server: BlockServer) -> None:
        self._host = host
        self._server = server

    async def start(self) -> str:
        self._host.enter()
        return await self._server.start()

    async def close(self) -> None:
        await self._server.close()


@contextmanager
def two_hosts(rate: str = "200mbit") -> Iterator[TwoHosts]:
    """Two namespaces of this process with a link of some rate; gone at the end, whatever happens.

    Raises `CannotMakeHostsError`.
    """
    _check_possible()
    hosts = TwoHosts(
        prefill=Host(name=f"baton-p-{os.getpid()}", device=f"bp{os.getpid()}", address="10.99.0.1"),
        decode=Host(name=f"baton-d-{os.getpid()}", device=f"bd{os.getpid()}", address="10.99.0.2"),
    )
    made: list[Host] = []
    try:
        for host in (hosts.prefill, hosts.decode):
            _add(host)
            made.append(host)
        _connect(hosts, rate)
        yield hosts
    finally:
        for host in made:
            _ip("netns", "del", host.name)


def _check_possible() -> None:
    if os.geteuid() != 0:
        raise CannotMakeHostsError("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise CannotMakeHostsError(f"there is no `{program}` here (Debian: iproute2)")


def _add(host: Host) -> None:
    try:
        _ip("netns", "add", host.name)
    except subprocess.CalledProcessError as error:
        raise CannotMakeHostsError(f"no network namespaces here: {error.stderr.strip()}") from error


def _connect(hosts: TwoHosts, rate: str) -> None:
    here, there = hosts.prefill, hosts.decode
    pair = ("type", "veth", "peer", "name", there.device, "netns", there.name)
    _ip("link", "add", here.device, "netns", here.name, *pair)
    for host in (here, there):
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
        host.set_link("up")
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        _run("tc", "-n", host.name, "qdisc", "add", "dev", host.device, *shape)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
