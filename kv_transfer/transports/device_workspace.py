"""Blocks of another shape in a GPU's memory: they come there, and are copied on by it.

Written against `Device`, as transports of such pools are; not run on a GPU so far.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

import torch

from kv_transfer.geometry import BlockId
from kv_transfer.repack import BlockShape
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import BlockMemory, LinkRefusedError, MemoryKind
from kv_transfer.transports.device import Device, device_memory
from kv_transfer.workspace import BlockView

__all__ = ["DeviceWorkspace"]


class DeviceWorkspace:
    """`Workspace` of pools on one device."""

    kind: MemoryKind = "cuda"

    def __init__(self, device: Device) -> None:
        """Of this device; see `Device` for which thread may call what."""
        self._device = device

    def blocks(self, num_blocks: int, bytes_per_block: int) -> BlockMemory:
        """All of it is taken at once, unlike on the host."""
        try:
            tensor = self._device.memory(num_blocks * bytes_per_block)
        except torch.OutOfMemoryError as error:
            raise LinkRefusedError(
                f"no memory on the device for {num_blocks} blocks of {bytes_per_block} bytes to "
                "repack in"
            ) from error
        return _DeviceBlocks(tensor, num_blocks, bytes_per_block)

    def apart(self) -> AbstractContextManager[None]:
        """See `Device.apart`."""
        return self._device.apart()

    def view(self, memory: BlockMemory, block_id: BlockId, shape: BlockShape) -> BlockView:
        """See `Workspace.view`."""
        block = device_memory(memory).tensor(block_id).view(shape.dimensions)
        return cast(BlockView, block)


class _DeviceBlocks:
    """`DeviceMemory` that transports write to and nobody computes with."""

    kind: MemoryKind = "cuda"
    region: SharedRegion | None = None

    def __init__(self, tensor: torch.Tensor, num_blocks: int, bytes_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block
        self._blocks = tensor.view(num_blocks, bytes_per_block)

    def block(self, block_id: BlockId) -> memoryview:
        raise TypeError("scratch blocks on a device have no host address")

    def tensor(self, block_id: BlockId) -> torch.Tensor:
        return self._blocks[block_id]
