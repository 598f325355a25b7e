"""A prefill and a decode worker's ends of a link in one process, over any transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import (
    FirstToken,
    GrantedBlock,
    PeerInfo,
    ReleaseReason,
    TransferKey,
)
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.scratch import ScratchArena, ScratchArenas
from kv_transfer.sender import KVSender
from kv_transfer.transport import BlockMemory, Clock, Transport
from kv_transfer.workspace import HostWorkspace, Workspace
from tests.fakes.block_memory import ByteMemory, granted_blocks, peer_info, transfer_key
from tests.fakes.clock import FakeClock
from tests.fakes.until import turned

BLOCK_BYTES = 512
BLOCK_SIZE = 4
NUM_TOKENS = 22
SOURCE = [3, 1, 4, 15, 9, 2]
PLACES = [BlockId(block_id) for block_id in (5, 0, 7, 9, 1, 2)]
FIRST = FirstToken(token_id=42)
POISON = 0xEE
"""What the destination holds before anything lands."""


def places_of(number: int) -> list[BlockId]:
    """The destination blocks of one of many transfers, its own."""
    return [BlockId(number * len(PLACES) + i) for i in range(len(PLACES))]


@dataclass
class KVLink:
    """Both ends, their pools, and what the sender reported."""

    sender: KVSender
    receiver: KVReceiver
    source: ByteMemory
    destination: ByteMemory
    into: BlockMemory
    """The destination as the receiver has it."""
    peer: PeerInfo
    me: PeerInfo
    scratch: ScratchArenas
    """Of the receiver."""
    prefill: str
    """The sender's incarnation."""
    ended: list[tuple[TransferKey, ReleaseReason]]
    ends: asyncio.Queue[tuple[TransferKey, ReleaseReason]] = field(default_factory=asyncio.Queue)

    @property
    def address(self) -> str:
        """Where the first transport's server listens."""
        return self.peer.endpoints[0][1]

    def reach_at(self, transport: str, address: str) -> None:
        """Reach the owner at another address, and over this transport only."""
        self.peer = replace(self.peer, endpoints=((transport, address),))

    def blocks(self) -> tuple[GrantedBlock, ...]:
        """The prompt's blocks with their generations of now."""
        return granted_blocks(NUM_TOKENS, BLOCK_SIZE, SOURCE, self.source.generations)

    def open(self, transfer_id: str = "t", epoch: int = 0) -> TransferKey:
        """Open a transfer between the two."""
        key = transfer_key(transfer_id, epoch, self.prefill)
        self.sender.open(key, self.me)
        return key

    def offer(self, transfer_id: str = "t", epoch: int = 0) -> TransferKey:
        """Open a transfer and grant all of it, in three grants."""
        key = self.open(transfer_id, epoch)
        blocks = self.blocks()
        assert self.sender.grant(key, blocks[:2], None)
        assert self.sender.grant(key, blocks[2:3], None)
        assert self.sender.grant(key, blocks[3:], FIRST)
        return key

    def incoming(
        self, key: TransferKey, places: list[BlockId] | None = None, deadline_s: float = 20.0
    ) -> IncomingTransfer:
        """The receiver's handle on a transfer."""
        return self.receiver.transfer(self.peer, key, places or PLACES, NUM_TOKENS, deadline_s)

    async def turned(self) -> None:
        """See `until.turned`: of both ends."""
        await turned(self.sender._thread, self.receiver._thread)

    async def next_end(self) -> ReleaseReason:
        """Why the next transfer ended on the sender's side."""
        async with asyncio.timeout(10):
            return (await self.ends.get())[1]

    @property
    def arena(self) -> ScratchArena:
        """Where the peer's blocks go first, if the receiver's are of another size."""
        return self.scratch.of(self.source.bytes_per_block)

    def has_arrived(self, places: list[BlockId] | None = None) -> bool:
        """Whether the destination blocks equal the source blocks; of another size, by tokens."""
        source = [BlockId(block_id) for block_id in SOURCE]
        if self.me.block_size == BLOCK_SIZE:
            return all(
                self.source.block(theirs) == self.destination.block(ours)
                for theirs, ours in zip(source, places or PLACES, strict=True)
            )
        return np.array_equal(
            _tokens_of(self.source, source, BLOCK_SIZE),
            _tokens_of(self.destination, places or PLACES, self.me.block_size),
        )

    def is_untouched(self) -> bool:
        """Whether no byte of the destination was written to."""
        size = self.destination.bytes_per_block
        return all(
            self.destination.block(BlockId(block_id)) == bytes([POISON]) * size
            for block_id in range(self.destination.num_blocks)
        )


@asynccontextmanager
async def kv_link(
    transport: Transport,
    *,
    receiving: Transport | None = None,
    lease_s: float = 5.0,
    clock: Clock | None = None,
    sweep_s: float = 0.005,
    num_blocks: int = 16,
    block_bytes: int = BLOCK_BYTES,
    on_end: Callable[[], object] | None = None,
    prefill: str = "p-1",
    own_size: int = BLOCK_SIZE,
    scratch: ScratchArenas | None = None,
) -> AsyncIterator[KVLink]:
    """A started link from the incarnation `prefill`; closed at the end, the receiver first.

    The receiver's blocks have `own_size` tokens.
    """
    own_bytes = block_bytes * own_size // BLOCK_SIZE
    source = ByteMemory(num_blocks, block_bytes, shared=True)
    destination = ByteMemory(num_blocks, own_bytes)
    source.fill(seed=1)
    for block_id in range(num_blocks):
        destination.block(BlockId(block_id))[:] = bytes([POISON]) * own_bytes
    decode = peer_info("decode-0", "d-1", bytes_per_block=own_bytes, block_size=own_size)
    ended: list[tuple[TransferKey, ReleaseReason]] = []
    ends: asyncio.Queue[tuple[TransferKey, ReleaseReason]] = asyncio.Queue()

    def note_end(key: TransferKey, reason: ReleaseReason) -> None:
        if on_end is not None:
            on_end()
        ended.append((key, reason))
        ends.put_nowait((key, reason))

    sender = KVSender(
        memory=seen_by(transport, source),
        me=peer_info(
            "prefill-0",
            prefill,
            bytes_per_block=block_bytes,
            block_size=BLOCK_SIZE,
            gpu="" if transport.capabilities.gpus != "two" else "GPU-1",
        ),
        generation_of=source.generation_of,
        transports=[transport],
        on_end=note_end,
        lease_s=lease_s,
        clock=clock or FakeClock(),
        sweep_s=sweep_s,
    )
    into = seen_by(transport, destination)
    scratch = scratch or ScratchArenas(workspace_for(transport))
    receiver = KVReceiver(
        memory=into,
        me=decode,
        transports=[receiving or transport],
        scratch=scratch,
        lease_s=lease_s,
    )
    try:
        peer = await sender.start()
        await receiver.start()
        yield KVLink(
            sender, receiver, source, destination, into, peer, decode, scratch, prefill, ended, ends
        )
    finally:
        await receiver.close()
        await sender.close()
        assert source.region is not None
        source.region.close()


def one_lot(transport: Transport | None = None) -> ScratchArenas:
    """Scratch for one transfer at a time, fewer blocks than it has; where the transport's pool is.

    That is in host memory if none is named.
    """
    workspace = None if transport is None else workspace_for(transport)
    return ScratchArenas(workspace, lot_bytes=4 * BLOCK_BYTES, arena_bytes=4 * BLOCK_BYTES)


def _tokens_of(
    memory: ByteMemory, blocks: Sequence[BlockId], block_size: int
) -> npt.NDArray[np.uint8]:
    """`[layers, 2 (K, V), tokens, bytes]` of the prompt in these blocks."""
    parts = [
        np.frombuffer(memory.block(block_id), np.uint8).reshape(2, 2, block_size, -1)
        for block_id in blocks
    ]
    return np.concatenate(parts, axis=2)[:, :, :NUM_TOKENS]


def seen_by(transport: Transport, memory: ByteMemory) -> BlockMemory:
    """As host memory, or on a device where that is all that the transport knows."""
    if "host" in transport.capabilities.memory_kinds:
        return memory
    from tests.fakes.device import DeviceBytes  # which loads torch

    return DeviceBytes(memory)


def workspace_for(transport: Transport) -> Workspace:
    """Of the memory that `seen_by` shows."""
    if "host" in transport.capabilities.memory_kinds:
        return HostWorkspace()
    from kv_transfer.transports.device_workspace import DeviceWorkspace  # which loads torch
    from tests.fakes.device import SharedHostDevice

    return DeviceWorkspace(SharedHostDevice())
