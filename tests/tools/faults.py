"""What goes wrong with a server's worker processes, drawn from a seed: kills, pauses, cuts.

A cut is a connection between workers, or from Front to one, that ends under both of its ends: its
socket is taken over by `pidfd_getfd` and shut down, which no packet filter or proxy is needed for.
Sockets are known by their addresses: `FAULTY_SETTINGS` gives those of Baton addresses that nothing
else has. Ray's own connections are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal, get_args

import psutil

from tests.tools.baton_server import BatonServer, Role

__all__ = ["FAULTY_SETTINGS", "Faults", "Link", "can_cut", "cut_one", "stopped"]

Hit = Literal["kill", "pause"]
Link = Literal["channel", "kv"]
Card = tuple[Hit, Role] | tuple[Literal["cut"], Link]

CHANNEL_HOST, KV_HOST = "127.0.0.2", "127.0.0.3"
FAULTY_SETTINGS = (f"channel.host={CHANNEL_HOST}", f"transfer.host={KV_HOST}")
_KV_SOCKET = "@baton-kv-"
"""How the abstract name of the Unix socket begins that `shm` has for its control messages."""

_SYS_PIDFD_GETFD = 438
_PAUSE_S = (0.5, 6.0)
_LOOK_FOR_LINK_S = 2.0
_LOOK_AGAIN_S = 0.005

_DECK: tuple[Card, ...] = (
    ("kill", "Decode"),
    ("kill", "Prefill"),
    *(("pause", "Decode"), ("pause", "Prefill")) * 2,
    *(("cut", "channel"), ("cut", "kv")) * 3,
)
"""Each card comes once before any comes again."""


class Faults:
    """Draws faults until it is cancelled; what it stopped goes on then."""

    def __init__(self, server: BatonServer, rng: random.Random, *, every_s: float) -> None:
        """`every_s`: from one fault to the next one, on average."""
        self._server = server
        self._rng = rng
        self._every_s = every_s
        self.done: Counter[str] = Counter()

    async def run(self, num_decks: int | None = None) -> None:
        """One fault after the other; pauses last while others go on."""
        async with asyncio.TaskGroup() as pauses:
            for number in itertools.count() if num_decks is None else range(num_decks):
                deck = [card for card in _DECK if card[0] != "cut" or can_cut()]
                for card in self._rng.sample(deck, len(deck)):
                    # The load has a pace; nothing is waited for.
                    await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._every_s)
                    if card[0] == "cut":
                        await self._cut(card[1])
                    else:
                        self._hit(card[0], card[1], pauses)
                # One of each link at least, however long it takes until there is one to cut.
                for link in get_args(Link) if can_cut() else ():
                    while self.done[f"cut {link}"] <= number:
                        await self._cut(link)

    async def _cut(self, link: Link) -> None:
        done = await cut_one(self._server, link, self._rng)
        self.done[f"cut {link}" if done else f"no {link} to cut"] += 1

    def _hit(self, kind: Hit, role: Role, pauses: asyncio.TaskGroup) -> None:
        pids = self._server.replica_pids(role)
        if not pids:
            self.done[f"no {role} to {kind}"] += 1
            return
        pid = self._rng.choice(pids)
        if kind == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            pauses.create_task(self._pause(pid, self._rng.uniform(*_PAUSE_S)))
        self.done[f"{kind} {role}"] += 1

    async def _pause(self, pid: int, seconds: float) -> None:
        async with stopped(pid):
            await asyncio.sleep(seconds)


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A process does nothing for the time of a block; it may be killed meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def can_cut() -> bool:
    """Whether this process may take over sockets of others: on Linux, as root or their tracer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            with _taken_over(os.getpid(), ours.fileno()):
                return True
        except OSError:
            return False


async def cut_one(server: BatonServer, link: Link, rng: random.Random) -> bool:
    """Shut down one connection, once there is one; False if there is none for a while.

    Connections for KV live as long as a transfer.
    """
    role: Role = "Decode" if link == "channel" else "Prefill"
    deadline = asyncio.get_running_loop().time() + _LOOK_FOR_LINK_S
    while asyncio.get_running_loop().time() < deadline:
        for pid in rng.sample(pids := server.replica_pids(role), len(pids)):
            found = list(_connections(pid, link))
            if found and _shut_down(pid, rng.choice(found)):
                return True
        await asyncio.sleep(_LOOK_AGAIN_S)
    return False


def _connections(pid: int, link: Link) -> Iterator[int]:
    """Descriptors of the connections that others have made to a process."""
    host = CHANNEL_HOST if link == "channel" else KV_HOST
    listening = psutil.CONN_LISTEN
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for connection in process.net_connections(kind="tcp4"):
            if connection.status != listening and connection.laddr[0] == host:
                yield connection.fd
        if link == "kv":
            named = [
                connection.fd
                for connection in process.net_connections(kind="unix")
                if str(connection.laddr).startswith(_KV_SOCKET)
            ]
            # The first one with the name listens.
            yield from sorted(named)[1:]


def _shut_down(pid: int, descriptor: int) -> bool:
    try:
        with _taken_over(pid, descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # it ended meanwhile
    return True


@contextlib.contextmanager
def _taken_over(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """Another process's socket, as one of ours; OSError if it is gone, or we may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        taken = libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if taken < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=taken) as connection:
        yield connection
