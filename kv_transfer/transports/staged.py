"""Blocks of a GPU's pool over a transport that moves host memory: by way of host copies.

The owner copies a block to the host when it is asked for; the reader has a few blocks in the host's
memory that the transport writes to and verifies, and copies each from there into its place. What is
checked, and what the fence is, is the transport's own: only this process's transfer thread copies,
each copy is over before it does anything else, and a closed session yields nothing more to copy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import Grant, GrantedBlock, PeerInfo, TransferKey, Verdict
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    FetchSession,
    GrantAuthority,
    MemoryKind,
    Transport,
)
from kv_transfer.transports.device import Device, DeviceMemory, device_memory

__all__ = ["STAGING_BYTES", "StagedTransport"]

STAGING_BYTES = 8 * 1024 * 1024
"""Of a transfer's blocks in host memory: enough to keep a connection busy."""


class StagedTransport:
    """Another transport, for pools on a GPU alone."""

    def __init__(self, inner: Transport, device: Device) -> None:
        """Over `inner`, with copies by `device`."""
        self.name = inner.name
        self.capabilities = replace(inner.capabilities, memory_kinds=frozenset({"cuda"}))
        self._inner = inner
        self._device = device

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker."""
        return self._inner.server(_HostCopies(device_memory(memory), self._device), authority, me)

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """As the inner transport does."""
        own = device_memory(memory)
        staging = _Staging(own.bytes_per_block, self._device)
        session = await self._inner.connect(staging, peer, key, me)
        return _StagedSession(session, staging, own, self._device)

    async def close(self) -> None:
        """Drop what the inner transport keeps."""
        await self._inner.close()


class _HostCopies:
    """`BlockMemory` to read from: each look at a block is a copy as it is at that moment."""

    kind: MemoryKind = "host"
    region: SharedRegion | None = None

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        self.num_blocks = memory.num_blocks
        self.bytes_per_block = memory.bytes_per_block
        self._memory = memory
        self._device = device

    def block(self, block_id: BlockId) -> memoryview:
        copied = self._device.host_memory(self.bytes_per_block)
        with self._device.apart():
            copied.copy_(self._memory.tensor(block_id), non_blocking=True)
        return _bytes_of(copied)


class _Staging:
    """`BlockMemory` that one transfer's blocks come to first."""

    kind: MemoryKind = "host"
    region: SharedRegion | None = None

    def __init__(self, bytes_per_block: int, device: Device) -> None:
        self.num_blocks = max(1, STAGING_BYTES // bytes_per_block)
        self.bytes_per_block = bytes_per_block
        self._tensor = device.host_memory(self.num_blocks * bytes_per_block)
        self._bytes = _bytes_of(self._tensor)

    def block(self, block_id: BlockId) -> memoryview:
        start = block_id * self.bytes_per_block
        return self._bytes[start : start + self.bytes_per_block]

    def tensor(self, block_id: BlockId) -> torch.Tensor:
        start = block_id * self.bytes_per_block
        return self._tensor[start : start + self.bytes_per_block]


class _StagedSession:
    """A session of the inner transport, and the copies of what it brings."""

    def __init__(
        self, inner: FetchSession, staging: _Staging, memory: DeviceMemory, device: Device
    ) -> None:
        self._inner = inner
        self._staging = staging
        self._memory = memory
        self._device = device

    def grants(self) -> AsyncIterator[Grant]:
        """See `FetchSession.grants`."""
        return self._inner.grants()

    async def fetch(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        """As many at a time as the staging holds."""
        most = self._staging.num_blocks
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            staged = {block.logical: BlockId(i) for i, block in enumerate(part)}
            async for block in self._inner.fetch(part, staged):
                self._copy(staged[block.logical], placement[block.logical])
                yield block

    async def renew(self) -> None:
        """See `FetchSession.renew`."""
        await self._inner.renew()

    async def confirm(self) -> Verdict:
        """See `FetchSession.confirm`."""
        return await self._inner.confirm()

    async def release(self) -> None:
        """See `FetchSession.release`."""
        await self._inner.release()

    async def close(self) -> None:
        """See `FetchSession.close`."""
        await self._inner.close()

    def _copy(self, staged: BlockId, place: BlockId) -> None:
        with self._device.apart():
            self._memory.tensor(place).copy_(self._staging.tensor(staged), non_blocking=True)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = tensor.numpy()
    return array.data
