"""Every block of a worker's KV pool and the one state that it is in. Knows no sequence.

    free --reserve--> reserved --mark_used--> used --release--> cached
      ^                |    \\                 | ^               |   |
      |                |     quarantine       | +-reserve (hit)-+   |
      +----release-----+----------------------+                     |
      |                ^     |                                      |
      |         unquarantine (the fence)                            |
      +------------- evicted where reserve needs room --------------+

A used block may have several holders; `release` gives up one hold. The last one frees the block,
or leaves it cached where it has a key: it still holds KV, and goes when room is needed.

What several sequences hold of a text costs its blocks once, as long as they keep it. Behind a
sliding window they do not: each goes on to a block of its own, and gives none back while another
still holds the shared one. So every further holder of such a block is promised one of the
available blocks (INV-ADMIT): sharing saves the computation there, never the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.geometry import BlockId, ceil_div
from workers.engine.prefix_cache import BlockKey, PrefixCache
from workers.errors import PoolTooSmallError


class BlockState(IntEnum):
    """A block's state, as the byte that the pool keeps for it."""

    FREE = 0
    RESERVED = 1
    """Taken for tokens that are not computed yet."""
    USED = 2
    """Holds KV, of one sequence or of several that begin alike."""
    QUARANTINED = 3
    """A transfer may still write to it; nobody gets it before the fence (INV-FENCE)."""
    CACHED = 4
    """Holds KV that can be found by its key; nobody holds it, whoever needs room gets it."""


class BlockStateError(RuntimeError):
    """A block was in another state than the operation needs: a bug, and nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How many blocks are in each state; the five add up to `total` (INV-CONSERVE)."""

    total: int
    free: int
    reserved: int
    used: int
    cached: int
    quarantined: int


class BlockPool:
    """Hands out blocks, all or nothing, and takes them back."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        window_blocks: int | None = None,
        sliding_windows: Sequence[int | None] = (None,),
    ) -> None:
        """Refuses a pool that cannot hold one full window (INV-POOL-WINDOW).

        `window_blocks` is what a sequence of max_model_len tokens needs at once, in all groups
        of layers, which see as far back as `sliding_windows` says; by default there is one, which
        keeps everything.
        """
        needed = ceil_div(max_model_len, block_size) if window_blocks is None else window_blocks
        if num_blocks < needed:
            raise PoolTooSmallError(
                f"INV-POOL-WINDOW: the pool holds {num_blocks * block_size} tokens "
                f"({num_blocks} blocks of {block_size}), the window is {max_model_len} tokens "
                f"and needs {needed} blocks"
            )
        self._block_size = block_size
        self._sliding_windows = tuple(sliding_windows)
        self._states = bytearray(num_blocks)
        self._counts = [num_blocks, 0, 0, 0, 0]
        # Last in, first out: a block that was just freed is warm, an untouched one costs page
        # faults. Reversed, so that a fresh pool hands out 0, 1, 2 ...
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        # Few blocks have more than one holder, and none that is not keyed.
        self._further_holders: dict[BlockId, int] = {}
        self._passed_by: set[BlockId] = set()
        """Those of them that holders give up behind their window."""
        self._num_promised = 0
        self.cache = PrefixCache(sliding_windows=sliding_windows)
        """Which blocks can be found; others only read it, and take its events."""
        self.generations: list[int] = [0] * num_blocks
        """How often each block was freed or evicted: cached and found again, it is the same.

        Other threads may read it; only the pool writes.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, in any state."""
        return len(self._states)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """By group of layers, how far back its tokens see."""
        return self._sliding_windows

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self._block_size

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds: free ones, and cached ones, which go by eviction."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_promised(self) -> int:
        """Those of them that holders of shared blocks take when their window moves on."""
        return self._num_promised

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return ceil_div(num_tokens, self._block_size)

    def state(self, block_id: BlockId) -> BlockState:
        """The state of one block."""
        return BlockState(self._states[block_id])

    def states(self, block_ids: Sequence[BlockId]) -> bytes:
        """The states of several blocks, a byte each: for comparing many at once."""
        return bytes(map(self._states.__getitem__, block_ids))

    def num_holders(self, block_id: BlockId) -> int:
        """How many holds on a block are not released; 0 for a free or cached one."""
        if self._states[block_id] in (BlockState.FREE, BlockState.CACHED):
            return 0
        return 1 + self._further_holders.get(block_id, 0)

    def counts(self) -> PoolCounts:
        """A snapshot of the number of blocks in each state."""
        free, reserved, used, quarantined, cached = self._counts
        return PoolCounts(
            total=len(self._states),
            free=free,
            reserved=reserved,
            used=used,
            cached=cached,
            quarantined=quarantined,
        )

    def fits(self, num_blocks: int, *, hits: Sequence[BlockId] = ()) -> bool:
        """Whether `reserve` would succeed."""
        num_taken = num_blocks + sum(map(self._takes_room, hits))
        return num_taken <= self.num_available - self._num_promised

    def reserve(
        self, num_blocks: int, *, hits: Sequence[BlockId] = ()
    ) -> tuple[BlockId, ...] | None:
        """Hold the hits (used or cached) and num_blocks blocks more (at least 1), in this order.

        Or take nothing at all and return None.
        """
        if num_blocks < 1:
            raise ValueError(f"cannot reserve {num_blocks} blocks: at least 1 is needed")
        self._check(hits, BlockState.USED, BlockState.CACHED)
        if not self.fits(num_blocks, hits=hits):
            return None
        self._share(hits)
        while len(self._free) < num_blocks:
            for block_id in self.cache.evict():
                self._make_free(block_id)
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        self._set(taken, BlockState.RESERVED)
        return (*hits, *taken)

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
        """Give up one hold on reserved or used blocks, in the order of the tokens.

        The last hold frees a block, which makes what was granted of it invalid (INV-GEN), or
        leaves it cached if it is keyed.
        """
        self._check(block_ids, BlockState.RESERVED, BlockState.USED)
        for block_id in reversed(block_ids):  # the last block of a sequence is evicted first
            if block_id in self._further_holders:
                self._drop_holder(block_id)
            elif self.cache.is_keyed(block_id):
                self._set((block_id,), BlockState.CACHED)
                self.cache.let_go(block_id)
            else:
                self._make_free(block_id)

    def exchange(self, block_ids: Sequence[BlockId], num_blocks: int) -> tuple[BlockId, ...]:
        """Release blocks and hold num_blocks others, not more than these; never fails.

        What they give back is enough, or what was promised to each holder of a shared one.
        """
        assert num_blocks <= len(block_ids), (
            f"INV-ADMIT: {num_blocks} blocks are asked for {len(block_ids)}"
        )
        self.release(block_ids)
        if num_blocks == 0:
            return ()
        taken = self.reserve(num_blocks)
        assert taken is not None, "INV-ADMIT: blocks that were given up could not be replaced"
        return taken

    # -- keyed blocks ---------------------------------------------------------------------------

    def store(
        self, block_id: BlockId, key: BlockKey, parent: BlockKey | None, *, group: int = 0
    ) -> BlockId:
        """Let a used, full block be found in a group; returns the block to hold in its place.

        That is the block itself, or the one that has the key already: it is held then, and the
        given one is released. The caller holds what `PrefixCache.store` asks for.
        """
        present = self.cache.block_of(key, group=group)
        if present is None:
            self._check((block_id,), BlockState.USED)
            self.cache.store(block_id, key, parent, group=group)
            return block_id
        self.swap(block_id, present)
        return present

    def swap(self, block_id: BlockId, present: BlockId) -> None:
        """Hold a keyed block in place of one's own, which is released."""
        self._check((block_id,), BlockState.RESERVED, BlockState.USED)
        self._share((present,))
        self.release((block_id,))

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Hold keyed blocks; the caller gives up as many in the next `exchange`, which pays."""
        self._check(block_ids, BlockState.USED, BlockState.CACHED)
        self._share(block_ids)

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Let these used blocks be found no more, nor what was computed from them."""
        for block_id in self.cache.forget(block_ids):
            self._make_free(block_id)

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
        cached = [
            BlockId(index) for index, state in enumerate(self._states) if state == BlockState.CACHED
        ]
        self.cache.check_invariants(idle=cached)
        shared = list(self._further_holders)
        assert self.states(shared) == bytes((BlockState.USED,)) * len(shared), (
            "INV-CONSERVE: a block that is not used has several holders"
        )
        self._check_promises()

    def _check_promises(self) -> None:
        promised = sum(self._further_holders[block_id] for block_id in self._passed_by)
        assert promised == self._num_promised <= self.num_available, (
            f"INV-ADMIT: {promised} blocks are promised, {self._num_promised} were counted, "
            f"{self.num_available} are available"
        )

    def _takes_room(self, hit: BlockId) -> bool:
        """Whether one more holder of a block takes one of those that are available."""
        return self._states[hit] == BlockState.CACHED or self.cache.is_passed_by(hit)

    def _share(self, block_ids: Sequence[BlockId]) -> None:
        """One more holder for used or cached blocks."""
        for block_id in block_ids:
            if self._states[block_id] == BlockState.CACHED:
                self.cache.hold(block_id)
                self._set((block_id,), BlockState.USED)
            else:
                self._add_holder(block_id)

    def _add_holder(self, block_id: BlockId) -> None:
        self._further_holders[block_id] = self._further_holders.get(block_id, 0) + 1
        if self.cache.is_passed_by(block_id):
            self._passed_by.add(block_id)
            self._num_promised += 1

    def _drop_holder(self, block_id: BlockId) -> None:
        self._further_holders[block_id] -= 1
        self._num_promised -= block_id in self._passed_by
        if self._further_holders[block_id] == 0:
            del self._further_holders[block_id]
            self._passed_by.discard(block_id)

    def _make_free(self, block_id: BlockId) -> None:
        self.generations[block_id] += 1
        self._set((block_id,), BlockState.FREE)
        self._free.append(block_id)

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
