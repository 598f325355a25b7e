"""Which bytes of another worker's blocks go where in one's own, if the two are laid out apart.

The same model's KV can lie in two pools in two ways and be the same numbers: blocks can be of
different sizes, and a tensor-parallel rank has its share of the KV heads. A block is
`[layers, 2 (K, V), tokens, heads, head_bytes]` (`KVLayout`), so what two blocks have in common is
a box of tokens and heads, the same in every layer, for K and for V. A plan names those boxes and
touches no byte; `kv_transfer/landing.py` copies.

Sources are planned one at a time. Of a prompt that lies on several ranks, each rank's plan fills
its heads of the same blocks; together they fill all of them, and none a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kv_transfer.geometry import ceil_div

__all__ = ["ARENA_BYTES", "LOT_BYTES", "BlockShape", "Box", "RepackPlan", "Span", "first_brought"]


LOT_BYTES = 4 * 1024 * 1024
"""Of scratch blocks, fetched into at a time: enough to keep a connection busy."""
ARENA_BYTES = 32 * LOT_BYTES
"""Of scratch blocks of one size: so many transfers at once, and no block that is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the bytes of a block are: `[layers, 2 (K, V), tokens, heads, head_bytes]`."""

    num_layers: int
    """Of a group: each has blocks of its own."""
    block_size: int
    """Tokens."""
    num_heads: int
    """KV heads in this pool."""
    head_bytes: int
    """Bytes of one head's K, or V, of one token."""
    first_head: int = 0
    """Which of the model's KV heads is the first one here."""

    @property
    def dimensions(self) -> tuple[int, int, int, int, int]:
        """As an array of bytes has them."""
        return self.num_layers, 2, self.block_size, self.num_heads, self.head_bytes

    @property
    def bytes_per_block(self) -> int:
        """Size of a block."""
        return math.prod(self.dimensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens, or of heads, that begins at different places of two blocks."""

    source: int
    own: int
    length: int

    @property
    def in_source(self) -> slice:
        """Where it is in the source's block."""
        return slice(self.source, self.source + self.length)

    @property
    def in_own(self) -> slice:
        """Where it is in ours."""
        return slice(self.own, self.own + self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a source block and one of our own have in common, in each layer, for K and for V."""

    own_block: int
    """Index of our block in the sequence."""
    tokens: Span
    heads: Span


def first_brought(first_token: int, *, source_size: int, own_size: int) -> int:
    """The first token that comes, and has a place, where those from first_token on are wanted.

    Both sides begin with the block that it is in, so that is where the later of the two begins.
    """
    return max(size * (first_token // size) for size in (source_size, own_size))


class RepackPlan:
    """Where the tokens of a sequence go, from one source."""

    def __init__(
        self, *, source: BlockShape, own: BlockShape, first_token: int, num_tokens: int
    ) -> None:
        """From blocks of shape `source` into blocks of shape `own`.

        Wanted are the tokens [first_token, num_tokens). What of their blocks comes before them is
        taken along, where the blocks of both sides hold it: behind a sliding window each side has
        given up what is before the block that the window begins in, and those begin elsewhere.
        Raises ValueError if they differ in anything but block size and heads, have no head in
        common, or there is no token to move.
        """
        if (source.num_layers, source.head_bytes) != (own.num_layers, own.head_bytes):
            raise ValueError(
                f"layers and bytes per head differ: {source.num_layers} and {source.head_bytes}, "
                f"{own.num_layers} and {own.head_bytes}"
            )
        if not 0 <= first_token < num_tokens:
            raise ValueError(f"tokens {first_token} to {num_tokens} are no range")
        self._source_size = source.block_size
        self._own_size = own.block_size
        self._first_token = first_brought(
            first_token, source_size=source.block_size, own_size=own.block_size
        )
        self._num_tokens = num_tokens
        self._heads = _heads_in_common(source, own)

    @property
    def heads(self) -> Span:
        """The heads that the source brings."""
        return self._heads

    @property
    def source_blocks(self) -> range:
        """Indices, in the sequence, of the source's blocks that are needed."""
        first = self._first_token // self._source_size
        return range(first, ceil_div(self._num_tokens, self._source_size))

    @property
    def own_blocks(self) -> range:
        """Indices, in the sequence, of our blocks that are written to."""
        first = self._first_token // self._own_size
        return range(first, ceil_div(self._num_tokens, self._own_size))

    @property
    def num_lacking(self) -> int:
        """Tokens at the beginning of our first block that do not come, and nobody looks at."""
        return self._first_token % self._own_size

    def boxes(self, index: int) -> tuple[Box, ...]:
        """Where the source's block of this index goes: IndexError if it is not needed.

        Tokens before our first block stay out: they are in blocks that others may hold too.
        """
        if index not in self.source_blocks:
            raise IndexError(f"source block {index} is not in {self.source_blocks}")
        begin = index * self._source_size
        token = max(begin, self._first_token)
        end = min(begin + self._source_size, self._num_tokens)
        boxes = []
        while token < end:
            own_block, offset = divmod(token, self._own_size)
            length = min(self._own_size - offset, end - token)
            tokens = Span(source=token - begin, own=offset, length=length)
            boxes.append(Box(own_block=own_block, tokens=tokens, heads=self._heads))
            token += length
        return tuple(boxes)


def _heads_in_common(source: BlockShape, own: BlockShape) -> Span:
    first = max(source.first_head, own.first_head)
    end = min(source.first_head + source.num_heads, own.first_head + own.num_heads)
    if first >= end:
        raise ValueError(
            f"no head in common: {source.num_heads} from {source.first_head} on, "
            f"{own.num_heads} from {own.first_head} on"
        )
    return Span(source=first - source.first_head, own=first - own.first_head, length=end - first)
