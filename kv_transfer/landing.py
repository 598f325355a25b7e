"""How blocks that a transport brings reach their places in our pool.

Where both workers lay KV out alike, a transport writes each block straight into its place. Where
they do not, it writes into a few scratch blocks of the source's shape; what was verified there is
copied on into our own blocks (`kv_transfer/repack.py` says which bytes). Either way a block has
landed only when all of it is in its place, and only the transfer thread writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.geometry import BlockId, LogicalBlock, group_and_index
from kv_transfer.handoff import GrantedBlock
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape, Box, RepackPlan
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import BlockMemory, MemoryKind

__all__ = ["InPlace", "Landing", "Repacked", "copy_box"]

Bytes = npt.NDArray[np.uint8]
Part = tuple[Sequence[GrantedBlock], Mapping[LogicalBlock, BlockId]]
"""Blocks to fetch together, and where the transport puts them."""

_SCRATCH_BLOCKS = 8
"""Fetched at a time: enough to keep a connection busy, a few megabytes in a transfer's life."""


class Landing(Protocol):
    """Between a transport and the blocks of one transfer."""

    @property
    def memory(self) -> BlockMemory:
        """What the transport writes to."""

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """What to fetch, one part after another; each is placed before the next is taken."""

    def place(self, block: GrantedBlock) -> None:
        """A block of the part that was taken last is where the transport put it, and verified."""


class InPlace:
    """Blocks of our own shape: a transport puts them where they belong."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """All at once."""
        yield fetch.blocks, fetch.placement

    def place(self, block: GrantedBlock) -> None:
        """It is in its place."""


class Repacked:
    """Blocks of another shape: by way of scratch blocks into our own."""

    def __init__(
        self,
        memory: BlockMemory,
        placement: Sequence[BlockId],
        *,
        source: BlockShape,
        own: BlockShape,
        first_token: int,
        num_tokens: int,
    ) -> None:
        """Tokens [first_token, num_tokens) go into `memory`: the i-th of our blocks that the plan
        names is `placement[i]`. The placement may be longer, never shorter. Raises ValueError.
        """
        self._plan = RepackPlan(
            source=source, own=own, first_token=first_token, num_tokens=num_tokens
        )
        needed = len(self._plan.own_blocks)
        if len(placement) < needed:
            raise ValueError(f"placement of {len(placement)} blocks for {needed} needed")
        if len(set(placement)) < len(placement):
            raise ValueError("a block appears twice in the placement")
        self._own_memory = memory
        self._source, self._own = source, own
        self._places = dict(zip(self._plan.own_blocks, placement, strict=False))
        self._scratch: dict[LogicalBlock, BlockId] = {}
        self.memory = _Scratch(_SCRATCH_BLOCKS, source.bytes_per_block)

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """As many at a time as there are scratch blocks."""
        for start in range(0, len(fetch.blocks), _SCRATCH_BLOCKS):
            blocks = fetch.blocks[start : start + _SCRATCH_BLOCKS]
            self._scratch = {block.logical: BlockId(i) for i, block in enumerate(blocks)}
            yield blocks, self._scratch

    def place(self, block: GrantedBlock) -> None:
        """Copy its tokens, and the heads that are ours, to where they belong."""
        content = self.memory.block(self._scratch[block.logical])
        _, index = group_and_index(block.logical)
        for box in self._plan.boxes(index):
            destination = self._own_memory.block(self._places[box.own_block])
            copy_box(box, content, self._source, destination, self._own)


def copy_box(
    box: Box,
    source: memoryview,
    source_shape: BlockShape,
    own: memoryview,
    own_shape: BlockShape,
) -> None:
    """Copy what two blocks have in common from the bytes of one into those of the other."""
    tokens, heads = box.tokens, box.heads
    _array(own, own_shape)[
        :, :, tokens.own : tokens.own + tokens.length, heads.own : heads.own + heads.length
    ] = _array(source, source_shape)[
        :,
        :,
        tokens.source : tokens.source + tokens.length,
        heads.source : heads.source + heads.length,
    ]


def _array(block: memoryview, shape: BlockShape) -> Bytes:
    return np.frombuffer(block, np.uint8).reshape(
        shape.num_layers, 2, shape.block_size, shape.num_heads, shape.head_bytes
    )


class _Scratch:
    """`BlockMemory` that a transport writes to and nobody computes with."""

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block
        self.kind: MemoryKind = "host"
        self.region: SharedRegion | None = None
        self._bytes = memoryview(bytearray(num_blocks * bytes_per_block))

    def block(self, block_id: BlockId) -> memoryview:
        start = block_id * self.bytes_per_block
        return self._bytes[start : start + self.bytes_per_block]
