"""The decode worker's end of every transport that talks in frames over a stream socket.

Where a block's bytes come from is its `BlockSource`'s business, and so is the fence: a session is
closed when its source is, and from then on no byte lands.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import Grant, GrantedBlock, PeerInfo, TransferKey, Verdict
from kv_transfer.transport import (
    CorruptTransferError,
    LinkRefusedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.stream_hooks import BlockSource
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.wire import FrameType, Header, Identity

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_MAX_WAITING_GRANTS = 1 << 16
_SILENCE_TICKS = 4


async def connect_frames(
    dial: Callable[[str], Awaitable[socket.socket]],
    transport: str,
    peer: PeerInfo,
    key: TransferKey,
    me: PeerInfo,
    security: LinkSecurity,
    timings: StreamTimings,
) -> FrameSocket:
    """Connect, prove, and greet; the answer must come from the incarnation that was asked for.

    `dial` connects a socket to the address that the peer offers for the transport; a descriptor
    that came with the welcome is kept by the frames. Raises `LinkRefusedError`, `PeerLostError` or
    what the owner refused the transfer with; nothing is open then.
    """
    address = peer.endpoint(transport)
    if address is None:
        raise LinkRefusedError(f"{peer.worker_id} offers no {transport} endpoint")
    try:
        async with asyncio.timeout(timings.connect_s):
            frames = security.connected(await dial(address))
            try:
                await security.introduce(frames, me, peer)
                await _greet(frames, peer, key, me)
            except BaseException:
                frames.close()
                raise
    except TimeoutError as error:
        raise PeerLostError(
            f"{peer.worker_id} at {address}: no answer in {timings.connect_s} s"
        ) from error
    return frames


async def receive_directions(
    frames: FrameSocket, identity: Identity, timings: StreamTimings
) -> bytes:
    """What an owner says right after its welcome about where its blocks are.

    Raises `PeerLostError`, or `CorruptTransferError` if it is something else.
    """
    try:
        async with asyncio.timeout(timings.connect_s):
            raw = memoryview(bytearray(wire.HEADER_BYTES))
            header = await _next_header(frames, identity, raw)
            payload = await _payload(frames, identity, header)
    except TimeoutError as error:
        raise PeerLostError(f"no answer in {timings.connect_s} s after the welcome") from error
    if header.kind is FrameType.ERROR:
        raise wire.unpack_error(payload)
    if header.kind is not FrameType.DIRECTIONS:
        raise CorruptTransferError(f"{header.kind.name} instead of directions")
    return payload


async def _greet(frames: FrameSocket, peer: PeerInfo, key: TransferKey, me: PeerInfo) -> None:
    identity = Identity.of(key)
    frames.accept_descriptor()
    await frames.send([wire.control_frame(identity, FrameType.HELLO, wire.pack_hello(key, me))])
    header = await _next_header(frames, identity, memoryview(bytearray(wire.HEADER_BYTES)))
    payload = await _payload(frames, identity, header)
    if header.kind is FrameType.ERROR:
        raise wire.unpack_error(payload)
    if header.kind is not FrameType.WELCOME:
        raise CorruptTransferError(f"{header.kind.name} instead of a welcome")
    found = wire.unpack_welcome(payload)
    if found.incarnation != peer.incarnation:
        raise LinkRefusedError(
            f"{peer.worker_id} is incarnation {found.incarnation}, wanted {peer.incarnation}"
        )


async def _next_header(frames: FrameSocket, identity: Identity, raw: memoryview) -> Header:
    await frames.receive_into(raw)
    header = wire.parse_header(raw)
    wire.check_identity(header, identity)
    return header


async def _payload(frames: FrameSocket, identity: Identity, header: Header) -> bytes:
    if header.kind in wire.BLOCK_FRAMES:  # its length is not bounded yet
        raise CorruptTransferError("a block came where none was asked for")
    payload = bytearray(header.length)
    await frames.receive_into(memoryview(payload))
    wire.check_payload(header, identity, memoryview(payload))
    return bytes(payload)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A block that was asked for, where it goes, and who waits for it."""

    block: GrantedBlock
    place: BlockId
    landed: asyncio.Queue[GrantedBlock | TransferError]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A block whose header has come, as its source sees it."""

    header: Header
    expected: _Expected
    session: StreamSession

    @property
    def block(self) -> GrantedBlock:
        return self.expected.block

    @property
    def place(self) -> BlockId:
        return self.expected.place

    def landed(self) -> None:
        self.session.take_block(self.header, self.expected)

    def failed(self, error: TransferError) -> None:
        self.session.fail(error)


class StreamSession:
    """One transfer: one task reads all frames and hands them to whom they are for."""

    def __init__(
        self,
        frames: FrameSocket,
        identity: Identity,
        source: BlockSource,
        timings: StreamTimings,
    ) -> None:
        """Over frames that have been greeted, from `source`; owns the frames."""
        self._frames = frames
        self._identity = identity
        self._source = source
        self._timings = timings
        self._expected: dict[LogicalBlock, _Expected] = {}
        self._arriving: dict[LogicalBlock, _Expected] = {}  # announced, and not yet verified
        self._grants: asyncio.Queue[Grant | TransferError] = asyncio.Queue()
        self._verdicts: asyncio.Queue[Verdict | TransferError] = asyncio.Queue()
        self._failure: TransferError | None = None
        self._failed = asyncio.Event()
        self._sending = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        self._watchdog = asyncio.create_task(self._watch())

    async def grants(self) -> AsyncIterator[Grant]:
        """Grants as the owner extends them."""
        while True:
            grant = _unwrap(await self._grants.get())
            yield grant
            if grant.is_last:
                return

    async def fetch(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        """Read blocks into their places."""
        landed: asyncio.Queue[GrantedBlock | TransferError] = asyncio.Queue()
        places = [placement[block.logical] for block in blocks]
        for block, place in zip(blocks, places, strict=True):
            self._expected[block.logical] = _Expected(block, place, landed)
        most = self._source.most_blocks()
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            await self._source.prepare(self, part, places[start : start + most])
            await self.say(FrameType.FETCH, wire.pack_blocks(part))
        for _ in blocks:
            yield _unwrap(await landed.get())

    async def renew(self) -> None:
        """Extend the lease."""
        await self.say(FrameType.RENEW)

    async def confirm(self) -> Verdict:
        """Ask for the verdict."""
        await self.say(FrameType.CONFIRM)
        return _unwrap(await self._verdicts.get())

    async def release(self) -> None:
        """Tell the owner that its blocks are not needed."""
        # The last word of a transfer that may have failed: it must not wait for a peer that is
        # stuck, and the owner learns the same from the closed connection.
        if self._failure is None and not self._sending.locked():
            self._frames.try_send(wire.control_frame(self._identity, FrameType.RELEASE))

    async def close(self) -> None:
        """Give up; no byte lands after it has returned."""
        self._reader.cancel()
        self._watchdog.cancel()
        await asyncio.gather(self._reader, self._watchdog, return_exceptions=True)
        self._frames.close()
        try:
            await self._source.close(self._failure)
        finally:
            self._expected.clear()
            self._arriving.clear()

    def take_block(self, header: Header, expected: _Expected) -> None:
        """All bytes of an announced block are there: verify them and hand it to who waits.

        Raises `CorruptTransferError`.
        """
        wire.check_payload(header, self._identity, self._source.content(expected.place))
        del self._arriving[expected.block.logical]
        expected.landed.put_nowait(expected.block)

    def fail(self, failure: TransferError) -> None:
        """End every wait of the session with the first failure."""
        if self._failure is not None:
            return
        self._failure = failure
        self._failed.set()
        self._grants.put_nowait(failure)
        self._verdicts.put_nowait(failure)
        for expected in (*self._expected.values(), *self._arriving.values()):
            expected.landed.put_nowait(failure)

    async def until_failure(self) -> None:
        """Raise what the session fails with, once it does."""
        await self._failed.wait()
        if self._failure is not None:
            raise self._failure

    async def say(self, kind: FrameType, payload: bytes = b"") -> None:
        """Send a frame; raises what the session has failed with, if it has."""
        frame = wire.control_frame(self._identity, kind, payload)
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            try:
                async with asyncio.timeout(self._timings.silence_s):
                    await self._frames.send([frame])
            except TimeoutError as error:
                raise PeerLostError(
                    f"the peer took no {kind.name} for {self._timings.silence_s} s"
                ) from error

    async def _read(self) -> None:
        raw = memoryview(bytearray(wire.HEADER_BYTES))
        try:
            while self._failure is None:
                header = await _next_header(self._frames, self._identity, raw)
                if header.kind is self._source.kind:
                    await self._receive_block(header)
                else:
                    payload = await _payload(self._frames, self._identity, header)
                    self._take_control(header.kind, payload)
        except TransferError as error:
            self.fail(error)

    async def _receive_block(self, header: Header) -> None:
        expected = self._expected.get(header.logical)
        if expected is None:
            raise CorruptTransferError(f"logical block {header.logical} was not asked for")
        block = expected.block
        said = (header.generation, header.valid_tokens, header.length)
        wanted = (block.generation, block.valid_tokens, self._source.payload_bytes())
        if said != wanted:
            raise CorruptTransferError(
                f"logical block {header.logical}: (generation, tokens, bytes) {said}, not {wanted}"
            )
        self._arriving[header.logical] = self._expected.pop(header.logical)
        await self._source.fill(self._frames, _Arrival(header, expected, self))

    def _take_control(self, kind: FrameType, payload: bytes) -> None:
        match kind:
            case FrameType.GRANT:
                if self._grants.qsize() >= _MAX_WAITING_GRANTS:
                    raise CorruptTransferError(f"over {_MAX_WAITING_GRANTS} grants are waiting")
                self._grants.put_nowait(wire.unpack_grant(payload))
            case FrameType.VERDICT:
                self._verdicts.put_nowait(wire.unpack_verdict(payload))
            case FrameType.ERROR:
                raise wire.unpack_error(payload)
            case FrameType.ALIVE:
                return
            case _:
                self._source.take(kind, payload)

    async def _watch(self) -> None:
        """Fail the session when nothing has come for too long that was listened for.

        Silence is counted in turns of this loop, not on the clock: if this process itself was
        stopped for a while, that says nothing about the peer.
        """
        quiet, heard = 0, self._frames.bytes_received
        while quiet < _SILENCE_TICKS:
            await asyncio.sleep(self._timings.silence_s / _SILENCE_TICKS)
            is_heard = self._frames.bytes_received != heard
            quiet = 0 if is_heard or self._source.is_full() else quiet + 1
            heard = self._frames.bytes_received
        self.fail(PeerLostError(f"nothing from the peer for {self._timings.silence_s} s"))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            logger.error("reader of a transfer failed", exc_info=error)
            self.fail(TransferError(f"internal error: {error!r}"))


def _unwrap(item: Item | TransferError) -> Item:
    if isinstance(item, TransferError):
        raise item
    return item
