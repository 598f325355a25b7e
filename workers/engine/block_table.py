"""Which blocks hold which tokens of a sequence, group by group, and how many a group needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kv_transfer.geometry import BlockId, KVGroup, ceil_div

ONE_FULL_GROUP: Final = KVGroup(layers=(0,), sliding_window=None)
"""The group of a model without sliding windows; which layers are in it matters to few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Blocks of one group in the order of the tokens; those before `start` were given up."""

    block_ids: tuple[BlockId, ...]
    start: int = 0
    """Index in the sequence of the first of them; above 0 only behind a sliding window."""

    @property
    def end(self) -> int:
        """Index behind the last block."""
        return self.start + len(self.block_ids)

    def cut(self, first: int, end: int) -> tuple[BlockId, ...]:
        """Those of the sequence's blocks first, first + 1, ... end - 1 that are in the table."""
        return self.block_ids[max(0, first - self.start) : max(0, end - self.start)]

    def block(self, index: int) -> BlockId:
        """The block with that index in the sequence; IndexError if it is not in the table."""
        if not self.start <= index < self.end:
            raise IndexError(f"block {index} is not among {self.start} to {self.end - 1}")
        return self.block_ids[index - self.start]

    def with_block(self, index: int, block_id: BlockId) -> BlockTable:
        """The table with another block at an index, at which it has one."""
        place = index - self.start
        before, after = self.block_ids[:place], self.block_ids[place + 1 :]
        return BlockTable(start=self.start, block_ids=(*before, block_id, *after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a sequence asks for in one group when it is admitted."""

    hit_start: int
    """Index of the first block that computing from the hit's end on sees anything of."""
    start: int
    """Index of the first block in the table: the same, or what comes after a prompt that arrives
    sees first."""
    num_own: int
    """Blocks behind the hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRules:
    """How many blocks a sequence holds in each group of layers, and which."""

    groups: tuple[KVGroup, ...]
    block_size: int
    chunk_tokens: int
    """Tokens of one sequence that a step computes at most."""

    @property
    def has_sliding_window(self) -> bool:
        """Whether any group forgets."""
        return any(group.sliding_window is not None for group in self.groups)

    def max_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """By group, blocks that a sequence of num_tokens may hold: enough for any step of it."""
        return tuple(
            group.max_blocks(num_tokens, chunk_tokens=self.chunk_tokens, block_size=self.block_size)
            for group in self.groups
        )

    def needed(
        self, group: KVGroup, num_tokens: int, *, position: int, is_decoding: bool
    ) -> tuple[int, int]:
        """(first block, end) of what a step needs whose first token is at `position`.

        A decoding sequence brings one token a step, any other as many as a chunk has.
        """
        chunk_tokens = 1 if is_decoding else self.chunk_tokens
        size = group.max_blocks(num_tokens, chunk_tokens=chunk_tokens, block_size=self.block_size)
        first = group.first_block(position, self.block_size)
        return first, min(ceil_div(num_tokens, self.block_size), first + size)

    def claims(
        self, num_tokens: int, *, hit_end: int, landing: int | None = None
    ) -> tuple[Claim, ...]:
        """By group, what a sequence of num_tokens asks for whose first hit_end blocks are found.

        Its KV is computed from there on; or it arrives, for a prompt of `landing` tokens, and may
        still have to be computed if it does not.
        """
        return tuple(
            self._claim(group, num_tokens, hit_end=hit_end, landing=landing)
            for group in self.groups
        )

    def _claim(
        self, group: KVGroup, num_tokens: int, *, hit_end: int, landing: int | None
    ) -> Claim:
        computed_from = hit_end * self.block_size
        first, end = self.needed(group, num_tokens, position=computed_from, is_decoding=False)
        if landing is None:
            return Claim(hit_start=first, start=first, num_own=end - hit_end)
        seen, last = self.needed(group, num_tokens, position=landing, is_decoding=True)
        num_own = max(end - hit_end, last - max(hit_end, seen))
        return Claim(hit_start=first, start=seen, num_own=num_own)
