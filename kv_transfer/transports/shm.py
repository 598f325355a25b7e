"""The shm transport: blocks that decode copies out of the prefill worker's own memory.

For workers of one host. Control goes in the same frames as with tcp, over a Unix socket in the
abstract namespace (no file, so nothing to guard or to leave behind; both ends ask the kernel that
the other is the same user, and prove to each other that they know the deployment's secret). The
owner's arena is a sealed memory file, whose read-only descriptor comes with the welcome; the
receiver maps it and can by no means write to it.

What tcp has, this has too. The owner authorises each block against the live lease and the pool's
generations when it is asked for, and answers with a digest made at that moment, keyed by transfer
and place; the receiver digests its own copy. A block that was freed and overwritten between the two
differs, and confirm checks lease and generations once more after the last copy. What tcp has and
this cannot is an owner that stops sending: the receiver may read bytes that are no longer its own.
They land in blocks that are not published, and the digest or the confirm throws them away.

The fence is exact: the only writer is this process's transfer thread, in copies that are over
before it does anything else. Memory of a peer that has died stays readable until it is unmapped,
and is of no use: without its confirm nothing is published.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.authentication import Secret
from kv_transfer.geometry import BlockId
from kv_transfer.handoff import GrantedBlock, PeerInfo, TransferKey
from kv_transfer.shared_memory import SharedMapping
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    CorruptTransferError,
    FetchSession,
    GrantAuthority,
    LinkRefusedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket, peer_credentials
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.stream_hooks import Arrival, BlockOutlet, BlockSource
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames
from kv_transfer.transports.wire import FrameType, Identity

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_BACKLOG_RETRY_S = 0.01


class ShmTransport:
    """Blocks of a worker on the same host, by memory; control over one Unix socket per transfer."""

    name = "shm"
    capabilities = CAPABILITIES["shm"]

    def __init__(self, *, secret: Secret, timings: StreamTimings | None = None) -> None:
        """Neither end needs an address: a server makes one up."""
        self._security = LinkSecurity(secret=secret)
        self._timings = timings or StreamTimings()
        self._arenas = _Arenas()

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker; ValueError if they are not in a region."""
        return StreamBlockServer(
            outlet=_RegionOutlet(memory),
            authority=authority,
            me=me,
            security=self._security,
            timings=self._timings,
        )

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Connect, greet, and map the peer's arena unless it is mapped already."""
        frames = await connect_frames(
            _dial, self.name, peer, key, me, self._security, self._timings
        )
        try:
            source = _ArenaSource(self._arenas, self._arenas.enter(peer, frames), memory)
        except BaseException:
            frames.close()
            raise
        return StreamSession(frames, Identity.of(key), source, memory, self._timings)

    async def close(self) -> None:
        """Unmap every peer's arena; no session may be open."""
        self._arenas.close()


class _RegionOutlet(BlockOutlet):
    """Blocks that stay where they are; a frame says that one is there, and its digest."""

    name = "shm"

    def __init__(self, memory: BlockMemory) -> None:
        if memory.region is None:
            raise ValueError("the blocks lie in no region that could be shared")
        self.bytes_per_block = memory.bytes_per_block
        self.descriptor = memory.region.descriptor
        self._memory = memory

    def listen(self) -> tuple[socket.socket, str]:
        address = f"@baton-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_socket_name(address))
        listener.listen(_BACKLOG)
        return listener, address

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        content = self._memory.block(block.block_id)
        return (wire.block_header(identity, FrameType.LOCATED, block, content),)

    def refusal(self, accepted: socket.socket) -> str | None:
        _, user = peer_credentials(accepted)
        return None if user == os.geteuid() else f"user {user} is not {os.geteuid()}"


@dataclass(slots=True, kw_only=True)
class _Arena:
    """One incarnation's memory, and who keeps it mapped."""

    worker_id: str
    incarnation: str
    mapping: SharedMapping
    process: int | None
    """A descriptor that shows the end of the process; None if that cannot be seen from here."""
    sessions: int = 0


class _Arenas:
    """Peers' arenas, mapped once per incarnation: pages that were read before are read at once.

    An arena is dropped when its process ends, when the worker comes back as another incarnation,
    and, where the end of the process cannot be seen, with its last session; else it would keep a
    dead worker's memory from the host. Belongs to the transfer thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Arena] = {}

    def enter(self, peer: PeerInfo, frames: FrameSocket) -> _Arena:
        """The arena of a peer that has just sent its welcome; `leave` must follow."""
        descriptor = frames.take_descriptor()
        if descriptor is None:
            raise CorruptTransferError(f"no descriptor came with the welcome of {peer.worker_id}")
        try:
            arena = self._kept.get(peer.incarnation) or self._map(peer, frames, descriptor)
        finally:
            os.close(descriptor)
        arena.sessions += 1
        return arena

    def leave(self, arena: _Arena) -> None:
        """A session has ended."""
        arena.sessions -= 1
        if arena.sessions == 0 and self._kept.get(arena.incarnation) is not arena:
            arena.mapping.close()

    def close(self) -> None:
        """Drop all of them."""
        for arena in list(self._kept.values()):
            self._drop(arena)

    def _map(self, peer: PeerInfo, frames: FrameSocket, descriptor: int) -> _Arena:
        try:
            mapping = SharedMapping(descriptor)
        except (OSError, ValueError) as error:
            raise LinkRefusedError(f"cannot map the arena of {peer.worker_id}: {error}") from error
        arena = _Arena(
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            mapping=mapping,
            process=_watch_process(frames),
        )
        for other in list(self._kept.values()):
            if other.worker_id == arena.worker_id:
                self._drop(other)
        if arena.process is not None:
            self._kept[arena.incarnation] = arena
            asyncio.get_running_loop().add_reader(arena.process, self._drop, arena)
        return arena

    def _drop(self, arena: _Arena) -> None:
        assert arena.process is not None, "an arena was kept whose end cannot be seen"
        del self._kept[arena.incarnation]
        asyncio.get_running_loop().remove_reader(arena.process)
        os.close(arena.process)
        if arena.sessions == 0:
            arena.mapping.close()


class _ArenaSource(BlockSource):
    """Blocks that are copied out of a peer's arena."""

    kind = FrameType.LOCATED

    def __init__(self, arenas: _Arenas, arena: _Arena, memory: BlockMemory) -> None:
        self._arenas = arenas
        self._arena = arena
        self._bytes_per_block = memory.bytes_per_block

    def payload_bytes(self, destination: memoryview) -> int:
        return 0

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        self._copy(arrival.block.block_id, arrival.destination)
        arrival.landed()
        await frames.pace(arrival.destination.nbytes)

    async def close(self, failure: TransferError | None) -> None:
        self._arenas.leave(self._arena)

    def _copy(self, block_id: BlockId, destination: memoryview) -> None:
        """A function of its own: a view that outlived it in a traceback would forbid unmapping."""
        start = block_id * self._bytes_per_block
        try:
            content = self._arena.mapping.view(start, self._bytes_per_block)
        except IndexError as error:
            raise CorruptTransferError(f"block {block_id} is outside the arena") from error
        # Through numpy, which lets the worker's other threads run meanwhile.
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(content, np.uint8))


def _watch_process(frames: FrameSocket) -> int | None:
    """A descriptor that can be read once the other end's process has ended."""
    try:
        return os.pidfd_open(frames.peer_process)
    except OSError as error:  # it has ended, is in another process namespace, or this is forbidden
        logger.info("a peer's end cannot be seen from here error=%s", error)
        return None


def _socket_name(address: str) -> str:
    return "\0" + address.removeprefix("@")


async def _dial(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await _connect(connection, address)
        _check_user(connection, address)
    except OSError as error:
        connection.close()
        raise PeerLostError(f"cannot connect to {address}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_user(connection: socket.socket, address: str) -> None:
    _, user = peer_credentials(connection)
    if user != os.geteuid():
        raise LinkRefusedError(f"{address} is user {user}'s, not {os.geteuid()}'s")


async def _connect(connection: socket.socket, address: str) -> None:
    while True:
        try:
            connection.connect(_socket_name(address))
        except BlockingIOError:  # the backlog is full; unlike with tcp, nothing is under way
            await asyncio.sleep(_BACKLOG_RETRY_S)
        else:
            return
