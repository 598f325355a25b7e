"""How blocks that a transport brings reach their places in our pool.

Where both workers lay KV out alike, a transport writes each block straight into its place. Where
they do not, it writes into a few scratch blocks of the source's shape, which the transfer is lent
(`kv_transfer/scratch.py`); what was verified there is copied on into our own blocks
(`kv_transfer/repack.py` says which bytes). Either way a block has landed only when all of it is in
its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.geometry import BlockId, LogicalBlock, group_and_index, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape, Box, RepackPlan
from kv_transfer.scratch import Lot, ScratchArena
from kv_transfer.transport import BlockMemory

__all__ = ["InPlace", "Landing", "Repacked", "copy_box"]

Bytes = npt.NDArray[np.uint8]
Part = tuple[Sequence[GrantedBlock], Mapping[LogicalBlock, BlockId]]
"""Blocks to fetch together, and where the transport puts them."""


class Landing(Protocol):
    """Between a transport and the blocks of one transfer; on the transfer thread."""

    @property
    def memory(self) -> BlockMemory:
        """What the transport writes to."""

    async def ready(self) -> None:
        """Return once there is where to fetch to, maybe after others' transfers; may be repeated.

        What it has then is the transfer's until `fenced`.
        """

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """What to fetch, one part after another; each is placed before the next is taken."""

    def place(self, block: GrantedBlock) -> None:
        """A block of the part that was taken last is where the transport put it, and verified."""

    def fenced(self) -> None:
        """The transport's fence has passed: it writes no more, wherever it was told to."""

    def unfenced(self) -> None:
        """The transport has broken its fence: what it was told to write to is lost."""


class InPlace:
    """Blocks of our own shape: a transport puts them where they belong."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory

    async def ready(self) -> None:
        """The places were reserved before anything was asked for."""

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """All at once."""
        yield fetch.blocks, fetch.placement

    def place(self, block: GrantedBlock) -> None:
        """It is in its place."""

    def fenced(self) -> None:
        """The places go back with the transfer's end, which comes after."""

    def unfenced(self) -> None:
        """Nor do the places go back: a transfer that ends so is not quiesced."""


class Repacked:
    """Blocks of another shape: by way of scratch blocks into our own."""

    def __init__(
        self,
        memory: BlockMemory,
        placement: Sequence[BlockId],
        scratch: ScratchArena,
        *,
        source: BlockShape,
        own: BlockShape,
        first_blocks: Sequence[int],
        num_tokens: int,
    ) -> None:
        """The first num_tokens tokens go into `memory`, by way of `scratch`, of the source's size.

        Group by group those from our block of the index in `first_blocks` on; `placement` names our
        blocks in this order. It may be longer, never shorter. Raises ValueError.
        """
        self._plans = [
            RepackPlan(
                source=source, own=own, first_token=first * own.block_size, num_tokens=num_tokens
            )
            for first in first_blocks
        ]
        needed = [
            logical_block(group, index)
            for group, plan in enumerate(self._plans)
            for index in plan.own_blocks
        ]
        if len(placement) < len(needed):
            raise ValueError(f"placement of {len(placement)} blocks for {len(needed)} needed")
        if len(set(placement)) < len(placement):
            raise ValueError("a block appears twice in the placement")
        self.memory = scratch
        self._own_memory = memory
        self._source, self._own = source, own
        self._places = dict(zip(needed, placement, strict=False))
        self._lot: Lot = ()
        self._scratch: dict[LogicalBlock, BlockId] = {}

    async def ready(self) -> None:
        """Be lent scratch blocks, once for all fetches."""
        if not self._lot:
            self._lot = await self.memory.borrow()

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """As many at a time as there are scratch blocks."""
        for start in range(0, len(fetch.blocks), len(self._lot)):
            blocks = fetch.blocks[start : start + len(self._lot)]
            self._scratch = {
                block.logical: place for block, place in zip(blocks, self._lot, strict=False)
            }
            yield blocks, self._scratch

    def place(self, block: GrantedBlock) -> None:
        """Copy its tokens, and the heads that are ours, to where they belong."""
        content = self.memory.block(self._scratch[block.logical])
        group, index = group_and_index(block.logical)
        for box in self._plans[group].boxes(index):
            place = self._places[logical_block(group, box.own_block)]
            copy_box(box, content, self._source, self._own_memory.block(place), self._own)

    def fenced(self) -> None:
        """Give the scratch blocks back."""
        lot, self._lot = self._lot, ()
        if lot:
            self.memory.give_back(lot)

    def unfenced(self) -> None:
        """Nobody gets the scratch blocks again."""
        lot, self._lot = self._lot, ()
        if lot:
            self.memory.lose()


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
