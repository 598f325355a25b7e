"""A TCP proxy that damages what a server answers, at an exact byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum


class Damage(Enum):
    """What happens at the byte."""

    FLIP = "flip"
    """One bit of it changes."""
    CUT = "cut"
    """The connection closes before it."""
    STALL = "stall"
    """Nothing comes from it on, while the connection stays."""


class TcpProxy:
    """Forwards connections to one address; the n-th connection is damaged at `at[n]`."""

    def __init__(self, target: str, damage: Damage, at: list[int]) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._damage = damage
        self._at = at
        self._accepted = 0
        self._writers: list[asyncio.StreamWriter] = []
        self.answered = 0
        """Bytes that the server sent on the last connection to end."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        number = self._accepted
        self._accepted += 1
        at = self._at[number] if number < len(self._at) else 1 << 60
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, to_server]
        asking = asyncio.create_task(_forward(reader, to_server))
        try:
            await self._answer(from_server, writer, at)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            writer.close()
            to_server.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: int
    ) -> None:
        position = 0
        while data := await reader.read(65536):
            if position <= at < position + len(data):
                index = at - position
                if self._damage is Damage.FLIP:
                    data = data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :]
                else:
                    writer.write(data[:index])
                    await writer.drain()
                    if self._damage is Damage.STALL:
                        await reader.read()
                    return
            position += len(data)
            writer.write(data)
            await writer.drain()
        self.answered = position

    def close(self) -> None:
        """End every connection."""
        for writer in self._writers:
            writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@asynccontextmanager
async def tcp_proxy(
    target: str, damage: Damage, at: list[int]
) -> AsyncIterator[tuple[str, TcpProxy]]:
    """A running proxy and the address at which it listens."""
    proxy = TcpProxy(target, damage, at)
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await proxy.handle(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{port}", proxy
    finally:
        server.close()
        proxy.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
