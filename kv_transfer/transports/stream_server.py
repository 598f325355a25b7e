"""The prefill worker's end of every transport that talks in frames over a stream socket.

One connection per transfer; what a block looks like on it is its `BlockOutlet`'s business. Nothing
is parsed of a peer that has not proved to know the deployment's secret. Whatever a peer sends, the
worst that happens is the end of its own connection, and with it of its own transfer: no frame is
read before its length is bounded, no block is sent that the authority does not allow at that
moment, and no slow reader delays another one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from dataclasses import dataclass

from kv_transfer.authentication import Admitted
from kv_transfer.doorkeeper import Doorkeeper
from kv_transfer.handoff import GrantedBlock, PeerInfo, ReleaseReason, TransferKey
from kv_transfer.transfer_thread import run_beside
from kv_transfer.transport import (
    CorruptTransferError,
    GrantAuthority,
    PeerLostError,
    TransferError,
)
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket, accept
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.stream_hooks import BlockOutlet, Delivery
from kv_transfer.transports.wire import FrameType, Header, Identity

logger = logging.getLogger(__name__)

_MAX_PENDING_BLOCKS = 1 << 20
_BATCH_BYTES = 256 * 1024  # small blocks share a system call up to this much
_ACCEPT_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimings:
    """Deadlines of a connection, in seconds."""

    connect_s: float = 2.0
    """For a connection, both proofs and the greeting."""
    silence_s: float = 2.0
    """Without a byte from the peer it counts as lost."""
    keep_alive_s: float = 0.5
    """The server says that it is there at least this often."""


class StreamBlockServer:
    """Accepts receivers and serves each on its own connection."""

    def __init__(
        self,
        *,
        outlet: BlockOutlet,
        authority: GrantAuthority,
        me: PeerInfo,
        security: LinkSecurity,
        timings: StreamTimings,
    ) -> None:
        """Serve the blocks of `outlet` as `authority` allows, to whom `security` lets in."""
        self._outlet = outlet
        self._authority = authority
        self._me = me
        self._security = security
        self._timings = timings
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._door: Doorkeeper[_Connection] = Doorkeeper(on_stranger=authority.note_stranger)

    async def start(self) -> str:
        """Listen; returns the address."""
        await self._outlet.start()
        listener, address = self._outlet.listen()
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))
        return address

    async def close(self) -> None:
        """Stop listening and drop every connection; safe to repeat."""
        if self._listener is not None and self._accepting is not None:
            tasks = (self._accepting, *self._door.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._listener.close()
        await self._outlet.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted = await accept(listener)
            except OSError as error:  # the peer was gone already, or no descriptors are left
                logger.warning("accept failed error=%s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if not self._door.makes_room():
                logger.warning("connection refused connections=%d", len(self._door))
                accepted.close()
                continue
            if (refusal := self._outlet.refusal(accepted)) is not None:
                logger.warning("connection refused reason=%s", refusal)
                accepted.close()
                continue
            try:
                frames = self._security.accepted(accepted)
            except OSError as error:  # the peer is gone already
                logger.info("connection lost error=%s", error)
                accepted.close()
                continue
            self._serve(frames)

    def _serve(self, frames: FrameSocket) -> None:
        connection = _Connection(
            frames, self._outlet, self._authority, self._me, self._security, self._timings
        )
        task = asyncio.create_task(connection.run())
        self._door.let_in(task, connection)
        task.add_done_callback(lambda task: self._connection_ended(task, frames))

    def _connection_ended(self, task: asyncio.Task[None], frames: FrameSocket) -> None:
        frames.close()  # here, since a task that is cancelled before its first step runs nothing
        self._door.has_left(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("connection failed", exc_info=error)


class _Connection:
    """One receiver, from its greeting to the end of its transfer."""

    def __init__(
        self,
        frames: FrameSocket,
        outlet: BlockOutlet,
        authority: GrantAuthority,
        me: PeerInfo,
        security: LinkSecurity,
        timings: StreamTimings,
    ) -> None:
        self.is_admitted = False
        """Whether the peer has proved itself."""
        self._frames = frames
        self._outlet = outlet
        self._authority = authority
        self._me = me
        self._security = security
        self._timings = timings
        self._control: deque[bytes] = deque()
        self._requested: deque[GrantedBlock] = deque()
        self._work = asyncio.Event()
        self._is_mid_frame = False
        self._has_answered = False

    async def run(self) -> None:
        """Serve the connection; whatever it ends by, the transfer has ended with it."""
        try:
            async with asyncio.timeout(self._timings.connect_s):
                admitted = await self._security.admit(self._frames, self._me)
                self.is_admitted = True
                key, identity = await self._greet(admitted)
        except (TransferError, TimeoutError) as error:
            if not self.is_admitted:
                self._authority.note_stranger()
            logger.info("greeting failed admitted=%s error=%s", self.is_admitted, error)
            return
        delivery = self._outlet.delivery(
            key, lambda kind, payload: self._say(identity, kind, payload)
        )
        try:
            await run_beside(
                self._read(key, identity, delivery),
                delivery.run(),
                self._write(key, identity),
                self._push_grants(key, identity),
                self._keep_alive(key, identity),
            )
        except TransferError as error:
            logger.info("transfer ended transfer_id=%s error=%s", key.transfer_id, error)
            if not self._is_mid_frame:
                self._tell(identity, error)
        finally:
            self._authority.release(key, ReleaseReason.PEER_LOST)  # unless it ended otherwise

    async def _greet(self, admitted: Admitted) -> tuple[TransferKey, Identity]:
        header = await self._next_header()
        if header.kind is not FrameType.HELLO or header.length > wire.MAX_HELLO_BYTES:
            raise CorruptTransferError(f"{header.kind.name} of {header.length} bytes as greeting")
        payload = await self._payload(header)
        key, peer = wire.unpack_hello(payload)
        admitted.check_name(peer.incarnation)
        identity = Identity.of(key)
        wire.check_identity(header, identity)
        wire.check_payload(header, identity, payload)
        try:
            self._authority.attach(key, peer, self._outlet.name)
        except TransferError as error:
            self._tell(identity, error)
            raise
        return key, identity

    async def _read(self, key: TransferKey, identity: Identity, delivery: Delivery) -> None:
        while True:
            header = await self._next_header()
            wire.check_identity(header, identity)
            if header.kind in wire.BLOCK_FRAMES:
                raise CorruptTransferError("a receiver sent a block")
            payload = await self._payload(header)
            wire.check_payload(header, identity, payload)
            match header.kind:
                case FrameType.FETCH:
                    self._take_request(key, wire.unpack_blocks(payload), delivery)
                case FrameType.RENEW:
                    self._authority.renew(key)
                case FrameType.CONFIRM:
                    verdict = self._authority.confirm(key)
                    self._has_answered = True
                    self._say(identity, FrameType.VERDICT, wire.pack_verdict(verdict))
                    return await self._linger(delivery)
                case FrameType.RELEASE:
                    self._authority.release(key, ReleaseReason.RELEASED)
                    return None
                case _:
                    delivery.take(header.kind, payload)

    async def _linger(self, delivery: Delivery) -> None:
        """Wait for the receiver to close: closing first could destroy the verdict on its way."""
        rest = memoryview(bytearray(wire.HEADER_BYTES))
        try:
            async with asyncio.timeout(self._timings.silence_s):
                await delivery.settle()
                while True:
                    await self._frames.receive_into(rest)  # a renewal that crossed the confirm
        except (PeerLostError, TimeoutError):
            return

    def _take_request(
        self, key: TransferKey, blocks: tuple[GrantedBlock, ...], delivery: Delivery
    ) -> None:
        if len(self._requested) + len(blocks) > _MAX_PENDING_BLOCKS:
            raise CorruptTransferError(f"more than {_MAX_PENDING_BLOCKS} blocks asked for at once")
        self._authority.authorize(key, blocks)
        delivery.request(blocks)
        self._requested.extend(blocks)
        self._work.set()

    async def _write(self, key: TransferKey, identity: Identity) -> None:
        welcome = wire.control_frame(identity, FrameType.WELCOME, wire.pack_welcome(self._me))
        await self._send([welcome], self._outlet.descriptor)
        while True:
            if self._control:
                await self._send([self._control.popleft()])
            elif self._requested:
                await self._send_blocks(key, identity, self._next_batch())
            else:
                self._work.clear()
                await self._work.wait()

    def _next_batch(self) -> list[GrantedBlock]:
        most = max(1, _BATCH_BYTES // self._outlet.work_bytes)
        return [self._requested.popleft() for _ in range(min(most, len(self._requested)))]

    async def _send_blocks(
        self, key: TransferKey, identity: Identity, batch: list[GrantedBlock]
    ) -> None:
        def check() -> None:
            self._authority.authorize(key, batch)

        check()
        pieces: list[bytes | memoryview] = []
        for block in batch:
            pieces += self._outlet.frame(identity, block)
        self._is_mid_frame = True
        await self._frames.send(pieces, check)
        self._is_mid_frame = False
        await self._frames.pace(len(batch) * self._outlet.work_bytes)  # digests take time too

    async def _send(self, pieces: list[bytes | memoryview], descriptor: int | None = None) -> None:
        self._is_mid_frame = True
        await self._frames.send(pieces, descriptor=descriptor)
        self._is_mid_frame = False

    async def _push_grants(self, key: TransferKey, identity: Identity) -> None:
        async for grant in self._authority.grants(key):
            self._say(identity, FrameType.GRANT, wire.pack_grant(grant))

    async def _keep_alive(self, key: TransferKey, identity: Identity) -> None:
        """Tell the receiver that this side is there, and end the connection with the transfer."""
        while True:
            await asyncio.sleep(self._timings.keep_alive_s)
            if self._has_answered:
                return
            self._authority.authorize(key, ())
            if not self._control:
                self._say(identity, FrameType.ALIVE)

    def _say(self, identity: Identity, kind: FrameType, payload: bytes = b"") -> None:
        self._control.append(wire.control_frame(identity, kind, payload))
        self._work.set()

    def _tell(self, identity: Identity, error: TransferError) -> None:
        self._frames.try_send(wire.control_frame(identity, FrameType.ERROR, wire.pack_error(error)))

    async def _next_header(self) -> Header:
        raw = bytearray(wire.HEADER_BYTES)
        await self._frames.receive_into(memoryview(raw))
        return wire.parse_header(raw)

    async def _payload(self, header: Header) -> bytes:
        payload = bytearray(header.length)
        await self._frames.receive_into(memoryview(payload))
        return bytes(payload)
