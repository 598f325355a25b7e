"""The cuda_ipc transport: blocks copied from one pool to another on the GPU that both lie on.

For two workers of one host and one GPU, where NCCL makes no group. It is the shm transport with a
GPU's memory: control over a Unix socket in the same frames; the owner says right after its welcome
by which handle its arena can be mapped, and the receiver maps it once per incarnation, for as long
as that process lives. Each block is copied device to device on a stream apart from the steps', and
counts as landed when that copy is over and was compared: both ends digest a fingerprint that the
GPU makes of the block where it lies, the owner when the block is asked for, the receiver of its own
copy. Confirm does the rest, as with shm.

The fence is exact: the only writer is this process's transfer thread, and it waits for each copy
before it does anything else.

Everything but `Device` runs in the tests with shared host memory in the GPU's place.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from kv_transfer.authentication import Secret
from kv_transfer.geometry import BlockId
from kv_transfer.handoff import GrantedBlock, PeerInfo, TransferKey
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    CorruptTransferError,
    FetchSession,
    GrantAuthority,
    LinkRefusedError,
    TransferError,
)
from kv_transfer.transport_kinds import GPU_CAPABILITIES
from kv_transfer.transports import wire
from kv_transfer.transports.device import (
    Device,
    DeviceMemory,
    block_content,
    block_work,
    device_memory,
)
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.local_socket import dial_local, listen_locally, refusal_of_stranger
from kv_transfer.transports.peer_arenas import PeerArena, PeerArenas
from kv_transfer.transports.stream_hooks import (
    Arrival,
    BlockOutlet,
    BlockSource,
    Delivery,
    PlainDelivery,
    Say,
)
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames, receive_directions
from kv_transfer.transports.wire import FrameType, Identity

__all__ = ["CudaIpcTransport"]


class CudaIpcTransport:
    """Blocks of a worker on the same GPU; control over one Unix socket per transfer."""

    name = "cuda_ipc"
    capabilities = GPU_CAPABILITIES["cuda_ipc"]

    def __init__(
        self, *, secret: Secret, device: Device, timings: StreamTimings | None = None
    ) -> None:
        """By `device`; neither end needs an address: a server makes one up."""
        self._security = LinkSecurity(secret=secret)
        self._device = device
        self._timings = timings or StreamTimings()
        self._arenas = PeerArenas[_MappedArena]()

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker; ValueError if they are in host memory."""
        return StreamBlockServer(
            outlet=_HandleOutlet(device_memory(memory), self._device),
            authority=authority,
            me=me,
            security=self._security,
            timings=self._timings,
        )

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Connect, greet, and map the peer's arena unless it is mapped already."""
        identity = Identity.of(key)
        frames = await connect_frames(
            dial_local, self.name, peer, key, me, self._security, self._timings
        )
        try:
            handle = await receive_directions(frames, identity, self._timings)
            arena = self._arenas.enter(peer, frames, lambda: self._map(peer, handle))
        except BaseException:
            frames.close()
            raise
        source = _MappedSource(self._arenas, arena, device_memory(memory), self._device)
        return StreamSession(frames, identity, source, self._timings)

    async def close(self) -> None:
        """Unmap every peer's arena; no session may be open."""
        self._arenas.close()

    def _map(self, peer: PeerInfo, handle: bytes) -> _MappedArena:
        try:
            return _MappedArena(self._device.open(handle))
        except (RuntimeError, ValueError) as error:
            raise LinkRefusedError(f"cannot map the arena of {peer.worker_id}: {error}") from error


class _MappedArena:
    """A peer's arena on the device, unmapped with the last tensor of it."""

    def __init__(self, arena: torch.Tensor) -> None:
        self._arena: torch.Tensor | None = arena

    def block(self, block_id: BlockId, bytes_per_block: int) -> torch.Tensor:
        """One block; IndexError if there is none."""
        assert self._arena is not None, "an arena is closed after its last session"
        start = block_id * bytes_per_block
        if not 0 <= start <= len(self._arena) - bytes_per_block:
            raise IndexError(f"block {block_id} of {len(self._arena) // bytes_per_block}")
        return self._arena[start : start + bytes_per_block]

    def close(self) -> None:
        self._arena = None


class _HandleOutlet(BlockOutlet):
    """Blocks that stay where they are; a frame says that one is there, and its digest."""

    name = "cuda_ipc"

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        self.work_bytes = block_work(memory)
        self._memory = memory
        self._device = device
        self._handle = device.share(memory)

    def listen(self) -> tuple[socket.socket, str]:
        return listen_locally()

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        with self._device.apart():
            content = block_content(self._memory, block.block_id)
        return (wire.block_header(identity, FrameType.LOCATED, block, content),)

    def refusal(self, accepted: socket.socket) -> str | None:
        return refusal_of_stranger(accepted)

    def delivery(self, key: TransferKey, say: Say) -> Delivery:
        """Says where the blocks are."""
        say(FrameType.DIRECTIONS, self._handle)
        return PlainDelivery()


class _MappedSource(BlockSource):
    """Blocks that are copied out of a peer's arena, on the device."""

    kind = FrameType.LOCATED
    memory: DeviceMemory

    def __init__(
        self,
        arenas: PeerArenas[_MappedArena],
        arena: PeerArena[_MappedArena],
        memory: DeviceMemory,
        device: Device,
    ) -> None:
        self.memory = memory
        self._arenas = arenas
        self._arena = arena
        self._device = device

    def content(self, place: BlockId) -> memoryview:
        with self._device.apart():
            return block_content(self.memory, place)

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        self._copy(arrival.block.block_id, arrival.place)
        arrival.landed()
        await frames.pace(block_work(self.memory))

    async def close(self, failure: TransferError | None) -> None:
        self._arenas.leave(self._arena)

    def _copy(self, block_id: BlockId, place: BlockId) -> None:
        """A function of its own: a tensor that outlived it in a traceback would stay mapped."""
        try:
            theirs = self._arena.mapping.block(block_id, self.memory.bytes_per_block)
        except IndexError as error:
            raise CorruptTransferError(f"block {block_id} is outside the arena") from error
        with self._device.apart():
            self.memory.tensor(place).copy_(theirs, non_blocking=True)
