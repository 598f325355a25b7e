"""A proxy between the two ends of a stream transport that damages an answer at an exact byte."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum

from tests.fakes.stream_kinds import StreamKind

_CHUNK_BYTES = 65536


class Damage(Enum):
    """What happens at the byte."""

    FLIP = "flip"
    """One bit of it changes."""
    CUT = "cut"
    """The connection closes before it."""
    STALL = "stall"
    """Nothing comes from it on, while the connection stays."""


class StreamProxy:
    """Forwards connections to one address; the n-th connection is damaged at `at[n]`.

    That is the number of a byte, or what is sent there: bytes that come in one piece.
    Descriptors that come with an answer are passed on, as they are on a direct connection.
    """

    def __init__(
        self, kind: StreamKind, target: str, damage: Damage, at: Sequence[int | bytes]
    ) -> None:
        self._kind = kind
        self.target = target
        """Where the next connections go."""
        self._damage = damage
        self._at = at
        self._accepted = 0
        self.answered = 0
        """Bytes that the server sent on the last connection to end."""
        self.damaged = asyncio.Event()
        """Set when a connection has been damaged."""

    async def handle(self, client: socket.socket) -> None:
        """One connection, which this owns."""
        number = self._accepted
        self._accepted += 1
        at = self._at[number] if number < len(self._at) else 1 << 60
        with client, self._kind.connect(self.target) as server:
            server.setblocking(False)
            asking = asyncio.create_task(_forward(client, server))
            try:
                await self._answer(server, client, at)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _answer(self, server: socket.socket, client: socket.socket, at: int | bytes) -> None:
        position = 0
        while True:
            data, descriptors = await _receive(server)
            try:
                if not data:
                    break
                index = data.find(at) if isinstance(at, bytes) else at - position
                if 0 <= index < len(data):
                    self.damaged.set()
                    if self._damage is not Damage.FLIP:
                        await _send(client, data[:index], descriptors)
                        if self._damage is Damage.STALL:
                            while (await _receive(server))[0]:
                                pass
                        return
                    data = data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
                position += len(data)
                await _send(client, data, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        self.answered = position


async def _forward(client: socket.socket, server: socket.socket) -> None:
    while (data := (await _receive(client))[0]) != b"":
        await _send(server, data, [])
    server.shutdown(socket.SHUT_WR)


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _CHUNK_BYTES, 1)
        except BlockingIOError:
            await _ready(connection, loop.add_reader, loop.remove_reader)
        else:
            return data, descriptors


async def _send(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    loop = asyncio.get_running_loop()
    while data:
        try:
            # An empty ancillary message would be one more thing to receive.
            sent = (
                socket.send_fds(connection, [data], descriptors)
                if descriptors
                else connection.send(data)
            )
        except BlockingIOError:
            await _ready(connection, loop.add_writer, loop.remove_writer)
        else:
            data, descriptors = data[sent:], []


async def _ready(
    connection: socket.socket, watch: Callable[..., None], unwatch: Callable[..., object]
) -> None:
    ready = asyncio.get_running_loop().create_future()
    watch(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        unwatch(connection)


@asynccontextmanager
async def stream_proxy(
    kind: StreamKind, target: str, damage: Damage, at: Sequence[int | bytes]
) -> AsyncIterator[tuple[str, StreamProxy]]:
    """A running proxy and the address at which it listens."""
    proxy = StreamProxy(kind, target, damage, at)
    handlers: set[asyncio.Task[None]] = set()
    listener, address = kind.listen()
    listener.setblocking(False)

    async def handle(accepted: socket.socket) -> None:
        try:
            await proxy.handle(accepted)
        except OSError:
            return

    async def accept() -> None:
        while True:
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            task = asyncio.create_task(handle(accepted))
            handlers.add(task)
            task.add_done_callback(handlers.discard)

    accepting = asyncio.create_task(accept())
    try:
        yield address, proxy
    finally:
        tasks = [accepting, *handlers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
