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

from kv_transfer.geometry import BlockId, LogicalBlock, group_and_index, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape, Box, RepackPlan
from kv_transfer.scratch import Lot, ScratchArena
from kv_transfer.transport import BlockMemory
from kv_transfer.workspace import BlockView, Workspace

__all__ = ["InPlace", "Landing", "Repacked"]

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
        workspace: Workspace,
        *,
        source: BlockShape,
        own: BlockShape,
        first_tokens: Sequence[int],
        num_tokens: int,
    ) -> None:
        """The first num_tokens tokens go into `memory`, by way of `scratch`, of the source's size.

        Group by group those from the token in `first_tokens` on; `placement` names our blocks in
        this order. It may be longer, never shorter. Copies are made in `workspace`. Raises
        ValueError.
        """
        self._plans = [
            RepackPlan(source=source, own=own, first_token=first, num_tokens=num_tokens)
            for first in first_tokens
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
        self.memory = scratch.memory
        self._scratch = scratch
        self._workspace = workspace
        self._own_memory = memory
        self._source, self._own = source, own
        self._places = dict(zip(needed, placement, strict=False))
        self._lot: Lot = ()
        self._arrived: dict[LogicalBlock, BlockId] = {}

    async def ready(self) -> None:
        """Be lent scratch blocks, once for all fetches."""
        if not self._lot:
            self._lot = await self._scratch.borrow()
            self._clear_what_lacks()

    def parts(self, fetch: Fetch) -> Iterator[Part]:
        """As many at a time as there are scratch blocks."""
        for start in range(0, len(fetch.blocks), len(self._lot)):
            blocks = fetch.blocks[start : start + len(self._lot)]
            self._arrived = {
                block.logical: place for block, place in zip(blocks, self._lot, strict=False)
            }
            yield blocks, self._arrived

    def place(self, block: GrantedBlock) -> None:
        """Copy its tokens, and the heads that are ours, to where they belong."""
        group, index = group_and_index(block.logical)
        with self._workspace.apart():
            content = self._workspace.view(self.memory, self._arrived[block.logical], self._source)
            for box in self._plans[group].boxes(index):
                _copy_box(box, content, self._own_view(group, box.own_block))

    def fenced(self) -> None:
        """Give the scratch blocks back."""
        lot, self._lot = self._lot, ()
        if lot:
            self._scratch.give_back(lot)

    def unfenced(self) -> None:
        """Nobody gets the scratch blocks again."""
        lot, self._lot = self._lot, ()
        if lot:
            self._scratch.lose()

    def _clear_what_lacks(self) -> None:
        """Attention masks what is behind a window: but it reads it, and NaN times zero is NaN."""
        for group, plan in enumerate(self._plans):
            if plan.num_lacking:
                with self._workspace.apart():
                    first = self._own_view(group, plan.own_blocks.start)
                    first[_ALL, _ALL, slice(plan.num_lacking), plan.heads.in_own] = 0

    def _own_view(self, group: int, index: int) -> BlockView:
        place = self._places[logical_block(group, index)]
        return self._workspace.view(self._own_memory, place, self._own)


_ALL = slice(None)


def _copy_box(box: Box, source: BlockView, own: BlockView) -> None:
    """Copy what two blocks have in common from one into the other."""
    tokens, heads = box.tokens, box.heads
    own[_ALL, _ALL, tokens.in_own, heads.in_own] = source[
        _ALL, _ALL, tokens.in_source, heads.in_source
    ]
