"""One non-blocking stream connection as the transports need it: exact reads, guarded writes.

Bytes go straight between the socket and the caller's memory. All of it runs on the loop of one
thread, and no read or write is in progress while that thread does anything else: once `close` has
returned, no byte reaches or leaves the memory that was handed in.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence

from kv_transfer.transport import PeerLostError

SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
_YIELD_AFTER_BYTES = 1024 * 1024  # a peer that is never slow must not keep other transfers waiting
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: Linux's struct ucred

Watch = Callable[..., None]
"""`loop.add_reader` or `loop.add_writer`."""
Unwatch = Callable[[int], object]


class FrameSocket:
    """Reads and writes whole pieces on a connected socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._descriptor = connection.fileno()  # selectors are slower with the object
        self._loop = asyncio.get_running_loop()
        self._since_yield = 0
        self._takes_descriptor = False
        self._descriptor_received: int | None = None
        self.bytes_received = 0
        """Total; a watchdog sees by it that the peer is alive, even inside one long frame."""

    async def handshake(self) -> bytes:
        """Do what must precede the first byte; what both ends can name the connection by.

        Raises `NotAuthenticatedError` or `PeerLostError`. A plain socket has neither.
        """
        return b""

    async def receive_into(self, view: memoryview) -> None:
        """Fill the view; `PeerLostError` if the connection ends first."""
        position, size = 0, view.nbytes
        while position < size:
            received = self._receive_some(view[position:])
            if received is None:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            position += received
            self.bytes_received += received
            await self.pace(received)

    def count_received(self, num_bytes: int) -> None:
        """Bytes of the peer's that came another way: they too are a sign that it is alive."""
        self.bytes_received += num_bytes

    def accept_descriptor(self) -> None:
        """Take the next descriptor that comes with the bytes; without this none is taken."""
        self._takes_descriptor = True

    def take_descriptor(self) -> int | None:
        """The descriptor that came, if one did: the caller's to close, and no other is taken."""
        descriptor, self._descriptor_received = self._descriptor_received, None
        self._takes_descriptor = False
        return descriptor

    async def pace(self, num_bytes: int) -> None:
        """Let other tasks run once in a while, by how many bytes this one has worked on."""
        self._since_yield += num_bytes
        if self._since_yield >= _YIELD_AFTER_BYTES:
            self._since_yield = 0
            await asyncio.sleep(0)

    async def send(
        self,
        pieces: Sequence[bytes | memoryview],
        still_allowed: Callable[[], None] | None = None,
        descriptor: int | None = None,
    ) -> None:
        """Write all pieces in order; `PeerLostError` if the connection ends first.

        A `descriptor` goes with the first byte, and stays open here. Whenever other tasks may have
        run, `still_allowed` is called before more bytes leave: what it raises ends the send in the
        middle of a frame, and the connection must be closed.
        """
        left = [memoryview(piece) for piece in pieces]
        while left:
            sent = self._send_some(left, descriptor)
            if sent is None:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            else:
                descriptor = None
                _drop_front(left, sent)
                await self.pace(sent)
            if left and still_allowed is not None:
                still_allowed()

    def try_send(self, frame: bytes) -> None:
        """Write a small last frame if there is room for it now; never waits, never fails."""
        try:
            self._socket.send(frame)
        except OSError:
            return

    @property
    def peer_process(self) -> int:
        """Process id of the other end of a Unix socket; 0 if it is not visible from here."""
        return peer_credentials(self._socket)[0]

    def close(self) -> None:
        """Close the connection; no task may be reading or writing. Safe to repeat."""
        self._socket.close()
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _receive_some(self, view: memoryview) -> int | None:
        try:
            if self._takes_descriptor:
                received = self._receive_with_descriptor(view)
            else:
                received = self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error
        if not received:
            raise PeerLostError("the peer closed the connection")
        return received

    def _receive_with_descriptor(self, view: memoryview) -> int:
        room = socket.CMSG_LEN(array.array("i").itemsize)  # for one; the kernel closes the others
        received, ancillary, _, _ = self._socket.recvmsg_into([view], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (self._descriptor_received,) = array.array("i", data)
                self._takes_descriptor = False
        return received

    def _send_some(self, pieces: Sequence[memoryview], descriptor: int | None) -> int | None:
        passed = [] if descriptor is None else [_passing(descriptor)]
        try:
            return self._socket.sendmsg(pieces, passed)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error

    async def _ready(self, watch: Watch, unwatch: Unwatch) -> None:
        await _ready(self._descriptor, watch, unwatch)


async def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a non-blocking listener; OSError as `socket.accept` has it.

    Unlike the loop's own way it leaves no connection to nobody when it is cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            await _ready(listener.fileno(), loop.add_reader, loop.remove_reader)
        else:
            return accepted


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user of the other end of a Unix socket, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


def _passing(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _drop_front(pieces: list[memoryview], num_bytes: int) -> None:
    while pieces and num_bytes >= pieces[0].nbytes:
        num_bytes -= pieces.pop(0).nbytes
    if num_bytes:
        pieces[0] = pieces[0][num_bytes:]


async def _ready(descriptor: int, watch: Watch, unwatch: Unwatch) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watch(descriptor, _wake, ready)
    try:
        await ready
    finally:
        unwatch(descriptor)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
