"""Block arithmetic: tokens, blocks and bytes of a KV pool; the one definition of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in its worker's pool."""

LogicalBlock = NewType("LogicalBlock", int)
"""Index of a block in a sequence: tokens [i * block_size, (i + 1) * block_size)."""

PROTOCOL_VERSION = 1
"""Raised whenever a peer built before the change could misread a message or a block."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below numerator / denominator."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How one block's bytes are laid out; two workers may exchange blocks only if it is equal.

    A block is `[num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]` of `dtype`, contiguous:
    one piece on the wire, fixed strides per layer for attention.
    """

    model_digest: str
    dtype: str
    element_bytes: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token needs, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def fingerprint(self) -> str:
        """Digest of everything a peer must agree on before it reads a block (128 bits, hex)."""
        fields = (
            PROTOCOL_VERSION,
            self.model_digest,
            self.dtype,
            self.element_bytes,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return ceil_div(num_tokens, self.block_size)
