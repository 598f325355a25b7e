"""Frames over one TCP connection, after both ends have proved that they know the secret.

Until then only messages of fixed sizes are read (`kv_transfer.authentication`), and nothing of them
is parsed. Whatever comes after that and is not a frame ends the connection, and only that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from deployments.channel.address import ChannelAddress
from deployments.channel.frames import BrokenFrameError, Frame, FrameBuffer, encode_frame
from kv_transfer.authentication import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Initiator,
    NotAuthenticatedError,
    Responder,
)

__all__ = ["ChannelLostError", "ChannelTimings", "FrameStream", "accept", "connect"]

_READ_BYTES = 256 * 1024
_LARGEST_BACKLOG_BYTES = 64 * 2**20
"""Written and not yet taken by the kernel; a peer that lets more wait is as good as gone."""
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 11_000),
)
"""A host that vanishes says nothing: after 11 s (5 + 3 * 2) the kernel ends the connection."""


class ChannelLostError(Exception):
    """The connection has ended, or is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTimings:
    """Times of a channel, in seconds."""

    connect_s: float = 2.0
    """For a connection and both proofs."""
    beat_s: float = 0.5
    """The worker says something at least this often."""
    silence_s: float = 2.0
    """A worker that says nothing for longer gets no new requests."""
    close_s: float = 0.5
    """For what was written last to leave."""
    find_s: float = 1.0
    """Between two looks for workers that are new."""
    find_first_s: float = 0.1
    """The same while there is none."""
    load_s: float = 0.05
    """Between two reports of load, where there are events to send."""


class FrameStream:
    """One connection that frames are sent and received on, by one reader; owns it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = FrameBuffer()

    async def receive(self) -> list[Frame]:
        """What has come, waiting for it; raises `ChannelLostError`."""
        try:
            received = await self._reader.read(_READ_BYTES)
            if not received:
                raise ChannelLostError("the other end closed the connection")
            return self._buffer.feed(received)
        except OSError as error:
            raise ChannelLostError(f"connection lost: {error}") from error
        except BrokenFrameError as error:
            raise ChannelLostError(f"broken frame: {error}") from error

    def send(self, frame: Frame) -> None:
        """Write a frame, in the order of the calls; of no effect on a connection that is lost.

        The reader is told of the loss. ValueError if the frame is too large.
        """
        encoded = encode_frame(frame)
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(encoded)
        if transport.get_write_buffer_size() > _LARGEST_BACKLOG_BYTES:
            transport.abort()

    async def writable(self) -> None:
        """Wait until the other end has taken most of what was written; returns if it is lost."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def finish(self, timeout_s: float) -> None:
        """Close once everything written has left, or after a while without that."""
        self._writer.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """End the connection at once; safe to repeat."""
        self._writer.transport.abort()


async def connect(
    address: ChannelAddress, initiator: Initiator, timings: ChannelTimings
) -> FrameStream:
    """A channel to the worker at an address; raises `ChannelLostError`."""
    try:
        async with asyncio.timeout(timings.connect_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                _prepare(writer)
                answer = initiator.answer(await reader.readexactly(CHALLENGE_BYTES))
                writer.write(answer.response)
                answer.check(await reader.readexactly(PROOF_BYTES))
            except BaseException:
                writer.transport.abort()
                raise
    except (OSError, EOFError, TimeoutError, NotAuthenticatedError) as error:
        raise ChannelLostError(f"no channel to {address.worker}: {error!r}") from error
    return FrameStream(reader, writer)


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    responder: Responder,
    timings: ChannelTimings,
) -> FrameStream:
    """The channel of who has connected; raises `ChannelLostError`, and then says nothing to it."""
    try:
        async with asyncio.timeout(timings.connect_s):
            _prepare(writer)
            writer.write(responder.challenge)
            admitted = responder.admit(await reader.readexactly(RESPONSE_BYTES))
            writer.write(admitted.proof)
    except (OSError, EOFError, TimeoutError, NotAuthenticatedError) as error:
        raise ChannelLostError(f"connection refused: {error!r}") from error
    return FrameStream(reader, writer)


def _prepare(writer: asyncio.StreamWriter) -> None:
    """Let small frames leave at once (asyncio sees to that), and a vanished peer be noticed."""
    connection: socket.socket = writer.get_extra_info("socket")
    for level, option, value in _KEEP_ALIVE:
        connection.setsockopt(level, option, value)
