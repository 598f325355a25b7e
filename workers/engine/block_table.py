"""Which blocks hold which tokens of a sequence, group by group, and how many a group needs."""

from __future__ import annotations

from collections.abc import Sequence
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

    def deal(
        self, block_ids: Sequence[BlockId], num_tokens: int, *, position: int
    ) -> tuple[BlockTable, ...]:
        """Part as many blocks as `max_blocks` says among the groups.

        Each table begins with the first block that a token at `position` sees anything of.
        """
        tables, dealt = [], 0
        for group, size in zip(self.groups, self.max_blocks(num_tokens), strict=True):
            start = group.first_block(position, self.block_size)
            tables.append(BlockTable(start=start, block_ids=tuple(block_ids[dealt : dealt + size])))
            dealt += size
        return tuple(tables)

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
