"""Where blocks of another shape are put first, and how their bytes are copied on from there.

One workspace for each kind of memory that a pool may lie in: what is repacked stays in that memory.
`transports/device_workspace.py` is that of a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import numpy as np

from kv_transfer.geometry import BlockId
from kv_transfer.repack import BlockShape
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import BlockMemory, MemoryKind

__all__ = ["BlockView", "HostWorkspace", "Workspace"]


class BlockView(Protocol):
    """A block's bytes, `[layers, 2 (K, V), tokens, heads, head_bytes]`, to be sliced."""

    def __getitem__(self, slices: tuple[slice, ...]) -> BlockView:
        """A part of it, no copy."""

    def __setitem__(self, slices: tuple[slice, ...], value: BlockView | int) -> None:
        """Copy a part of another block of this workspace here, or one byte everywhere."""


class Workspace(Protocol):
    """Makes scratch memory, and shows blocks there and in the pool as what they hold."""

    @property
    def kind(self) -> MemoryKind:
        """Of the memory that it works in."""

    def blocks(self, num_blocks: int, bytes_per_block: int) -> BlockMemory:
        """Memory for scratch blocks; `LinkRefusedError` if there is none left."""

    def apart(self) -> AbstractContextManager[None]:
        """What is copied within is copied when it is left."""

    def view(self, memory: BlockMemory, block_id: BlockId, shape: BlockShape) -> BlockView:
        """A block of the pool, or of `blocks`; no copy."""


class HostWorkspace:
    """Of pools in host memory."""

    kind: MemoryKind = "host"

    def blocks(self, num_blocks: int, bytes_per_block: int) -> BlockMemory:
        """Side by side, as NIXL registers them; the host has memory only for what is used."""
        return _HostBlocks(num_blocks, bytes_per_block)

    def apart(self) -> AbstractContextManager[None]:
        """The processor is never late."""
        return nullcontext()

    def view(self, memory: BlockMemory, block_id: BlockId, shape: BlockShape) -> BlockView:
        """See `Workspace.view`."""
        block: Any = np.frombuffer(memory.block(block_id), np.uint8).reshape(shape.dimensions)
        return cast(BlockView, block)


class _HostBlocks:
    """`BlockMemory` that transports write to and nobody computes with."""

    kind: MemoryKind = "host"
    region: SharedRegion | None = None

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block
        self._bytes = np.zeros(num_blocks * bytes_per_block, np.uint8).data

    def block(self, block_id: BlockId) -> memoryview:
        start = block_id * self.bytes_per_block
        return self._bytes[start : start + self.bytes_per_block]
