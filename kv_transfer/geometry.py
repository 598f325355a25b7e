"""Block arithmetic: tokens, blocks and bytes of a KV pool; the one definition of each.

Layers that see everything and layers with a sliding window need their tokens' KV for different
times, so they keep it in different blocks: layers are parted into groups of equal number, and a
block holds one group's layers. All blocks are of equal size, so that one pool serves all groups.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in its worker's pool."""

LogicalBlock = NewType("LogicalBlock", int)
"""Names a block of a sequence: its group and its index there; see `logical_block`."""

PROTOCOL_VERSION = 3
"""Raised whenever a peer built before the change could misread a message or a block."""

_BLOCKS_PER_GROUP = 2**20
"""Names of blocks in each group: 16 M tokens in blocks of 16, and 32 bits name 4096 groups."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below numerator / denominator."""
    return -(-numerator // denominator)


def logical_block(group: int, index: int) -> LogicalBlock:
    """The name of a group's tokens [index * block_size, (index + 1) * block_size)."""
    return LogicalBlock(group * _BLOCKS_PER_GROUP + index)


def group_and_index(logical: LogicalBlock) -> tuple[int, int]:
    """What `logical_block` made a name of."""
    return divmod(logical, _BLOCKS_PER_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share their blocks, and how far back their tokens see."""

    layers: tuple[int, ...]
    """In the order in which they lie in a block."""
    sliding_window: int | None
    """Tokens that a token sees, itself included; None is all before it."""

    def first_token(self, position: int) -> int:
        """The first token that one at `position` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a token at `position` sees anything of."""
        return self.first_token(position) // block_size

    def max_blocks(self, num_tokens: int, *, chunk_tokens: int, block_size: int) -> int:
        """Blocks that a sequence of num_tokens needs at once, computed in such chunks at most.

        That is what the first token of a chunk sees, and the chunk. n tokens that begin anywhere
        lie in at most ceil((n - 1) / block_size) + 1 blocks.
        """
        everything = ceil_div(num_tokens, block_size)
        if self.sliding_window is None:
            return everything
        seen = self.sliding_window - 1 + chunk_tokens
        return min(everything, ceil_div(seen - 1, block_size) + 1)


def _digest(*fields: object) -> str:
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]


def group_layers(sliding_windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Part layers, given by their windows, into groups of equal number; full ones come first.

    A model with one kind of layers has one group, a mixed one as few as divide both kinds.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(sliding_windows):
        by_window.setdefault(window, []).append(layer)
    size = math.gcd(*map(len, by_window.values()))
    kinds = sorted(by_window.items(), key=lambda kind: kind[0] is not None)
    return tuple(
        KVGroup(layers=tuple(layers[start : start + size]), sliding_window=window)
        for window, layers in kinds
        for start in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How one block's bytes are laid out.

    Two workers may exchange blocks if it is equal, or differs in nothing that can be repacked.

    A block is `[layers of a group, 2 (K, V), block_size, num_kv_heads, head_dim]` of `dtype`,
    contiguous: one piece on the wire, fixed strides per layer for attention.
    """

    model_digest: str
    dtype: str
    element_bytes: int
    num_layers: int
    num_kv_heads: int
    """In this pool: of a tensor-parallel rank, its share."""
    head_dim: int
    block_size: int
    sliding_windows: tuple[int | None, ...] = ()
    """By layer; empty if none has one."""
    tp_size: int = 1
    """Ranks over which the model's KV heads are split, in equal runs."""
    tp_rank: int = 0
    """Which run of them this pool has."""
    groups: tuple[KVGroup, ...] = field(init=False)
    """Made of the windows."""

    def __post_init__(self) -> None:
        windows = self.sliding_windows or (None,) * self.num_layers
        if len(windows) != self.num_layers:
            raise ValueError(f"{len(windows)} sliding windows for {self.num_layers} layers")
        # A window of one token would be a layer that sees nothing but itself.
        if any(window is not None and window < 2 for window in windows):
            raise ValueError(f"sliding windows must be of 2 tokens at least: {windows}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"there is no rank {self.tp_rank} of {self.tp_size}")
        object.__setattr__(self, "groups", group_layers(windows))

    @property
    def layers_per_block(self) -> int:
        """Layers of each group."""
        return len(self.groups[0].layers)

    @property
    def has_sliding_window(self) -> bool:
        """Whether any group forgets."""
        return any(group.sliding_window is not None for group in self.groups)

    @property
    def bytes_per_layer_token(self) -> int:
        """KV bytes that one token needs in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token needs, all layers, while all of them see it."""
        return self.num_layers * self.bytes_per_layer_token

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers of a group."""
        return self.layers_per_block * self.bytes_per_layer_token * self.block_size

    @property
    def content_fingerprint(self) -> str:
        """Digest of what the numbers are, wherever they lie (128 bits, hex).

        Peers that agree on it can repack each other's blocks (`kv_transfer/repack.py`).
        """
        return _digest(
            PROTOCOL_VERSION,
            self.model_digest,
            self.dtype,
            self.element_bytes,
            self.num_kv_heads * self.tp_size,
            self.head_dim,
            tuple((group.layers, group.sliding_window) for group in self.groups),
        )

    @property
    def fingerprint(self) -> str:
        """Digest of everything a peer must agree on to read a block as it is (128 bits, hex)."""
        return _digest(self.content_fingerprint, self.block_size, self.tp_size, self.tp_rank)

    def for_rank(self, tp_rank: int, tp_size: int) -> KVLayout:
        """The layout of one of tp_size ranks that share these heads in equal runs.

        ValueError if they cannot, there is no such rank, or this is a rank's layout already.
        """
        if self.tp_size != 1 or tp_size < 1 or self.num_kv_heads % tp_size:
            raise ValueError(
                f"{self.num_kv_heads} KV heads of rank {self.tp_rank} of {self.tp_size} cannot "
                f"be split over {tp_size} ranks"
            )
        heads = self.num_kv_heads // tp_size
        return replace(self, num_kv_heads=heads, tp_size=tp_size, tp_rank=tp_rank)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold num_tokens tokens."""
        return ceil_div(num_tokens, self.block_size)

    def sequence_blocks(self, num_tokens: int, *, chunk_tokens: int) -> int:
        """Blocks that a sequence of num_tokens needs at once, all groups."""
        return sum(
            group.max_blocks(num_tokens, chunk_tokens=chunk_tokens, block_size=self.block_size)
            for group in self.groups
        )

    def first_tokens(self, num_tokens: int, *, num_found: int = 0) -> tuple[int, ...]:
        """By group, the first token that what comes after num_tokens tokens sees, beside num_found.

        What a hand-off brings begins with the block that it is in: both of its sides ask this.
        """
        return tuple(max(num_found, group.first_token(num_tokens)) for group in self.groups)
