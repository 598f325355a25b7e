"""Blocks of other workers' sizes: what arrives in them is looked at and copied on.

A transport may write to where it was told until its fence has passed, and one that has to register
memory keeps that for as long as it knows the peer. So scratch is not a transfer's but the
receiver's: one arena for each size of block, never moved and never freed while the receiver is.
A transfer is lent a lot of an arena's blocks. They come back once its fence has passed and not
before (INV-FENCE); those of a broken fence never do.

Arenas are made on the worker's loop; what is free in them belongs to the transfer thread.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kv_transfer.geometry import BlockId
from kv_transfer.repack import ARENA_BYTES, LOT_BYTES
from kv_transfer.transport import BlockMemory, LinkRefusedError
from kv_transfer.workspace import HostWorkspace, Workspace

__all__ = ["Lot", "ScratchArena", "ScratchArenas"]

Lot = tuple[BlockId, ...]
"""Blocks of an arena that are lent together."""

_MAX_ARENAS = 4
"""Sizes of blocks that one worker is sent, other than its own: workers are changed from one size to
another, not among many."""


class ScratchArena:
    """Lends the blocks of a scratch memory."""

    def __init__(self, memory: BlockMemory, *, blocks_per_lot: int) -> None:
        """All of it is free; it has as many blocks as some lots have."""
        self.memory = memory
        """What transports write to."""
        # The lot that came back last is lent first: its memory is there already.
        self._free: list[Lot] = [
            tuple(map(BlockId, range(start, start + blocks_per_lot)))
            for start in reversed(range(0, memory.num_blocks, blocks_per_lot))
        ]
        self._num_left = len(self._free)
        self._waiting: deque[asyncio.Future[Lot]] = deque()

    @property
    def free_lots(self) -> int:
        """Those that could be lent now."""
        return len(self._free)

    async def borrow(self) -> Lot:
        """A lot for one transfer alone, in the order of coming; waits while there is none.

        `give_back` or `lose` is its end. `LinkRefusedError` if every lot is lost.
        """
        if self._num_left == 0:
            raise _nothing_left()
        if self._free:
            return self._free.pop()
        waiting: asyncio.Future[Lot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.give_back(waiting.result())  # it was given, and never taken
            raise

    def give_back(self, lot: Lot) -> None:
        """Its transfer's fence has passed; once for each time that it was lent."""
        while self._waiting:
            oldest = self._waiting.popleft()
            if not oldest.done():
                oldest.set_result(lot)
                return
        self._free.append(lot)

    def lose(self) -> None:
        """The fence of one that was lent is broken: nobody may have it again."""
        self._num_left -= 1
        if self._num_left == 0:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_exception(_nothing_left())
            self._waiting.clear()


class ScratchArenas:
    """The arenas of one receiver, by the size of their blocks."""

    def __init__(
        self,
        workspace: Workspace | None = None,
        *,
        lot_bytes: int = LOT_BYTES,
        arena_bytes: int = ARENA_BYTES,
        max_arenas: int = _MAX_ARENAS,
    ) -> None:
        """In `workspace`, which is the host's memory unless it is told; none is there before it is
        asked for, and together they have `max_arenas * arena_bytes`.
        """
        self.workspace: Workspace = workspace or HostWorkspace()
        """How blocks are copied between an arena and the pool."""
        self._lot_bytes = lot_bytes
        self._arena_bytes = arena_bytes
        self._max_arenas = max_arenas
        self._arenas: dict[int, ScratchArena] = {}
        self._refused: dict[int, str] = {}

    def of(self, bytes_per_block: int) -> ScratchArena:
        """For blocks of this size; `LinkRefusedError` if there is no memory for more of them.

        Where there was none, none is asked for again: a device would be kept waiting by each try.
        """
        arena = self._arenas.get(bytes_per_block)
        if arena is None:
            self._check_bounds(bytes_per_block)
            arena = self._arenas[bytes_per_block] = self._make(bytes_per_block)
        return arena

    def _check_bounds(self, bytes_per_block: int) -> None:
        if bytes_per_block in self._refused:
            raise LinkRefusedError(self._refused[bytes_per_block])
        if bytes_per_block > self._arena_bytes:
            raise LinkRefusedError(
                f"a block of {bytes_per_block} bytes cannot be repacked in {self._arena_bytes}"
            )
        if len(self._arenas) == self._max_arenas:
            raise LinkRefusedError(
                f"blocks of {bytes_per_block} bytes cannot be repacked beside those of "
                f"{sorted(self._arenas)} that this worker was sent before"
            )

    def _make(self, bytes_per_block: int) -> ScratchArena:
        blocks_per_lot = max(1, self._lot_bytes // bytes_per_block)
        num_lots = self._arena_bytes // (blocks_per_lot * bytes_per_block)
        try:
            memory = self.workspace.blocks(num_lots * blocks_per_lot, bytes_per_block)
        except LinkRefusedError as error:
            self._refused[bytes_per_block] = str(error)
            raise
        return ScratchArena(memory, blocks_per_lot=blocks_per_lot)


def _nothing_left() -> LinkRefusedError:
    return LinkRefusedError("nothing can be repacked: the fence of all scratch blocks is broken")
