"""Every block of a worker's KV pool and the one state that it is in. Knows no sequence.

    free --reserve--> reserved --mark_used--> used
      ^                  |    \\                |
      |                  |     quarantine       |
      +-----release------+----------------------+
                         ^     |
                unquarantine (the fence)

`release` is the only way back to free, so that a prefix cache has one place to keep a block at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.geometry import BlockId, ceil_div
from workers.errors import PoolTooSmallError


class BlockState(IntEnum):
    """A block's state, as the byte that the pool keeps for it."""

    FREE = 0
    RESERVED = 1
    """Taken for tokens that are not computed yet."""
    USED = 2
    """Holds KV."""
    QUARANTINED = 3
    """A transfer may still write to it; nobody gets it before the fence (INV-FENCE)."""


class BlockStateError(RuntimeError):
    """A block was in another state than the operation needs: a bug, and nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many blocks are in each state; the four add up to `total` (INV-CONSERVE)."""

    total: int
    free: int
    reserved: int
    used: int
    quarantined: int


class BlockPool:
    """Hands out blocks, all or nothing, and takes them back."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Refuses a pool that cannot hold one full window (INV-POOL-WINDOW)."""
        if num_blocks * block_size < max_model_len:
            raise PoolTooSmallError(
                f"INV-POOL-WINDOW: the pool holds {num_blocks * block_size} tokens "
                f"({num_blocks} blocks of {block_size}), the window is {max_model_len} tokens"
            )
        self._block_size = block_size
        self._states = bytearray(num_blocks)
        self._counts = [num_blocks, 0, 0, 0]
        # Last in, first out: a block that was just freed is warm, an untouched one costs page
        # faults. Reversed, so that a fresh pool hands out 0, 1, 2 ...
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self.generations: list[int] = [0] * num_blocks
        """How often each block was freed. Other threads may read it; only the pool writes."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, in any state."""
        return len(self._states)

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    @property
    def num_free(self) -> int:
        """Blocks that `reserve` could hand out now."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return ceil_div(num_tokens, self._block_size)

    def state(self, block_id: BlockId) -> BlockState:
        """The state of one block."""
        return BlockState(self._states[block_id])

    def states(self, block_ids: Sequence[BlockId]) -> bytes:
        """The states of several blocks, a byte each: for comparing many at once."""
        return bytes(map(self._states.__getitem__, block_ids))

    def counts(self) -> PoolCounts:
        """A snapshot of the number of blocks in each state."""
        free, reserved, used, quarantined = self._counts
        return PoolCounts(
            total=len(self._states),
            free=free,
            reserved=reserved,
            used=used,
            quarantined=quarantined,
        )

    def reserve(self, num_blocks: int) -> tuple[BlockId, ...] | None:
        """Take num_blocks free blocks (at least 1), or none at all and return None."""
        if num_blocks < 1:
            raise ValueError(f"cannot reserve {num_blocks} blocks: at least 1 is needed")
        if num_blocks > len(self._free):
            return None
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        self._set(taken, BlockState.RESERVED)
        return tuple(taken)

    def mark_used(self, block_ids: Sequence[BlockId]) -> None:
        """Reserved blocks now hold KV."""
        self._check(block_ids, BlockState.RESERVED)
        self._set(block_ids, BlockState.USED)

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Keep reserved blocks from everybody: a transfer may still write to them."""
        self._check(block_ids, BlockState.RESERVED)
        self._set(block_ids, BlockState.QUARANTINED)

    def unquarantine(self, block_ids: Sequence[BlockId]) -> None:
        """The transport's fence has passed: the blocks are their owner's reservation again."""
        self._check(block_ids, BlockState.QUARANTINED)
        self._set(block_ids, BlockState.RESERVED)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Free reserved or used blocks; what was granted of them turns invalid (INV-GEN)."""
        self._check(block_ids, BlockState.RESERVED, BlockState.USED)
        for block_id in block_ids:
            self.generations[block_id] += 1
        self._set(block_ids, BlockState.FREE)
        self._free.extend(reversed(block_ids))

    def check_invariants(self) -> None:
        """Raise AssertionError, with the invariant's id, if the pool contradicts itself."""
        counted = [self._states.count(state) for state in BlockState]
        assert counted == self._counts, (
            f"INV-CONSERVE: counted {counted} blocks by state, kept {self._counts}"
        )
        assert sum(counted) == self.num_blocks, (
            f"INV-CONSERVE: states of {sum(counted)} blocks of {self.num_blocks}"
        )
        assert len(self._free) == len(set(self._free)) == counted[BlockState.FREE], (
            f"INV-CONSERVE: {len(self._free)} blocks are listed as free, "
            f"{counted[BlockState.FREE]} are"
        )
        assert not any(self.states(self._free)), (
            "INV-CONSERVE: a block that is taken is listed as free"
        )

    def _check(self, block_ids: Sequence[BlockId], *allowed: BlockState) -> None:
        """All of the blocks are in an allowed state and none is named twice, or nothing moves."""
        for block_id in block_ids:
            if self._states[block_id] not in allowed:
                needed = " or ".join(state.name.lower() for state in allowed)
                raise BlockStateError(
                    f"block {block_id} is {self.state(block_id).name.lower()}, needed {needed} "
                    "(INV-CONSERVE, INV-FENCE)"
                )
        if len(set(block_ids)) != len(block_ids):
            raise BlockStateError("INV-CONSERVE: a block is named twice in one operation")

    def _set(self, block_ids: Sequence[BlockId], state: BlockState) -> None:
        states, counts = self._states, self._counts
        for block_id in block_ids:
            counts[states[block_id]] -= 1
            states[block_id] = state
        counts[state] += len(block_ids)
