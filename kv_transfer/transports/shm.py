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

import os
import socket
from collections.abc import Sequence

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
    TransferError,
)
from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.local_socket import (
    dial_local,
    listen_locally,
    refusal_of_stranger,
)
from kv_transfer.transports.peer_arenas import PeerArena, PeerArenas
from kv_transfer.transports.stream_hooks import Arrival, BlockOutlet, BlockSource
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames
from kv_transfer.transports.wire import FrameType, Identity


class ShmTransport:
    """Blocks of a worker on the same host, by memory; control over one Unix socket per transfer."""

    name = "shm"
    capabilities = CAPABILITIES["shm"]

    def __init__(self, *, secret: Secret, timings: StreamTimings | None = None) -> None:
        """Neither end needs an address: a server makes one up."""
        self._security = LinkSecurity(secret=secret)
        self._timings = timings or StreamTimings()
        self._arenas = PeerArenas[SharedMapping]()

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
            dial_local, self.name, peer, key, me, self._security, self._timings
        )
        try:
            source = _ArenaSource(self._arenas, self._enter(peer, frames), memory)
        except BaseException:
            frames.close()
            raise
        return StreamSession(frames, Identity.of(key), source, self._timings)

    async def close(self) -> None:
        """Unmap every peer's arena; no session may be open."""
        self._arenas.close()

    def _enter(self, peer: PeerInfo, frames: FrameSocket) -> PeerArena[SharedMapping]:
        descriptor = frames.take_descriptor()
        if descriptor is None:
            raise CorruptTransferError(f"no descriptor came with the welcome of {peer.worker_id}")
        try:
            return self._arenas.enter(peer, frames, lambda: SharedMapping(descriptor))
        except (OSError, ValueError) as error:
            raise LinkRefusedError(f"cannot map the arena of {peer.worker_id}: {error}") from error
        finally:
            os.close(descriptor)


class _RegionOutlet(BlockOutlet):
    """Blocks that stay where they are; a frame says that one is there, and its digest."""

    name = "shm"

    def __init__(self, memory: BlockMemory) -> None:
        if memory.region is None:
            raise ValueError("the blocks lie in no region that could be shared")
        self.work_bytes = memory.bytes_per_block
        self.descriptor = memory.region.descriptor
        self._memory = memory

    def listen(self) -> tuple[socket.socket, str]:
        return listen_locally()

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        content = self._memory.block(block.block_id)
        return (wire.block_header(identity, FrameType.LOCATED, block, content),)

    def refusal(self, accepted: socket.socket) -> str | None:
        return refusal_of_stranger(accepted)


class _ArenaSource(BlockSource):
    """Blocks that are copied out of a peer's arena."""

    kind = FrameType.LOCATED

    def __init__(
        self,
        arenas: PeerArenas[SharedMapping],
        arena: PeerArena[SharedMapping],
        memory: BlockMemory,
    ) -> None:
        self._arenas = arenas
        self._arena = arena
        self.memory = memory

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        self._copy(arrival.block.block_id, self.memory.block(arrival.place))
        arrival.landed()
        await frames.pace(self.memory.bytes_per_block)

    async def close(self, failure: TransferError | None) -> None:
        self._arenas.leave(self._arena)

    def _copy(self, block_id: BlockId, destination: memoryview) -> None:
        """A function of its own: a view that outlived it in a traceback would forbid unmapping."""
        size_bytes = self.memory.bytes_per_block
        try:
            content = self._arena.mapping.view(block_id * size_bytes, size_bytes)
        except IndexError as error:
            raise CorruptTransferError(f"block {block_id} is outside the arena") from error
        # Through numpy, which lets the worker's other threads run meanwhile.
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(content, np.uint8))
