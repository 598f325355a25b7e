"""Pools of tensor-parallel ranks in which each byte says what it is: layer, K or V, token, head.

A sequence has a table of blocks for each group of layers, and in each group tokens of its own:
where there is a window, those that it leaves.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product

import numpy as np

from kv_transfer.compatibility import block_shape
from kv_transfer.geometry import BlockId, KVLayout, logical_block
from kv_transfer.handoff import GrantedBlock, PeerInfo
from kv_transfer.repack import BlockShape
from tests.fakes.block_memory import ByteMemory

WINDOW = 64
NUM_BLOCKS = 24
"""Of every rank's pool: more than any sequence here needs."""
Tables = Sequence[Sequence[int]]
"""A sequence's blocks, by group."""
GUARD = 0xEE
"""What a pool holds where nothing of the sequence is."""
_NAME = struct.Struct("<BBHB")


def whole_layout(block_size: int, sliding_windows: tuple[int | None, ...] = ()) -> KVLayout:
    """All heads of a small model of two layers."""
    return KVLayout(
        model_digest="m" * 32,
        dtype="fp16",
        element_bytes=2,
        num_layers=2,
        num_kv_heads=4,
        head_dim=6,
        block_size=block_size,
        sliding_windows=sliding_windows,
    )


def rank_info(layout: KVLayout, name: str, incarnation: str) -> PeerInfo:
    """A worker with a pool of this layout."""
    return PeerInfo.of(
        layout,
        worker_id=name,
        incarnation=incarnation,
        max_model_len=WINDOW,
        pool_tokens=NUM_BLOCKS * layout.block_size,
        host="here",
    )


def guarded(info: PeerInfo, *, shared: bool = False) -> ByteMemory:
    """A worker's pool without any sequence."""
    memory = ByteMemory(NUM_BLOCKS, info.bytes_per_block, shared=shared)
    for block_id in range(NUM_BLOCKS):
        memory.block(BlockId(block_id))[:] = bytes([GUARD]) * info.bytes_per_block
    return memory


def write_sequence(
    memory: ByteMemory, info: PeerInfo, tables: Tables, first_tokens: Sequence[int], num_tokens: int
) -> None:
    """Put the KV of a sequence, with the heads that the worker has, into its blocks.

    In each group from the block on that holds the token in `first_tokens`.
    """
    size = info.block_size
    for group, (table, first) in enumerate(zip(tables, first_tokens, strict=True)):
        tokens = range(first // size * size, num_tokens)
        _write_group(memory, block_shape(info), group, table, tokens)


def _write_group(
    memory: ByteMemory, shape: BlockShape, group: int, table: Sequence[int], tokens: range
) -> None:
    places = product(tokens, range(shape.num_layers), range(2), range(shape.num_heads))
    for token, layer, kind, head in places:
        index, offset = divmod(token, shape.block_size)
        start = _start(shape, layer, kind, offset, head)
        name = _NAME.pack(group * shape.num_layers + layer, kind, token, shape.first_head + head)
        content = (name * shape.head_bytes)[: shape.head_bytes]
        memory.block(BlockId(table[index]))[start : start + shape.head_bytes] = content


def holds_sequence(
    memory: ByteMemory,
    info: PeerInfo,
    tables: Tables,
    first_tokens: Sequence[int],
    num_tokens: int,
    *,
    source_size: int | None = None,
) -> bool:
    """Whether the pool holds what `write_sequence` writes, and everywhere else what it held.

    From blocks of `source_size` tokens no token before one of these comes: there are zeros.
    """
    expected = guarded(info)
    write_sequence(expected, info, tables, first_tokens, num_tokens)
    for table, first in zip(tables, first_tokens, strict=True):
        index = first // info.block_size
        begins = first // (source_size or info.block_size) * (source_size or info.block_size)
        _clear(expected, info, table[index], begins - index * info.block_size)
    return all(
        memory.block(BlockId(block_id)) == expected.block(BlockId(block_id))
        for block_id in range(NUM_BLOCKS)
    )


def _clear(memory: ByteMemory, info: PeerInfo, block_id: int, num_tokens: int) -> None:
    """Zeros in the first tokens of a block."""
    shape = block_shape(info)
    block = np.frombuffer(memory.block(BlockId(block_id)), np.uint8).reshape(shape.dimensions)
    block[:, :, : max(0, num_tokens)] = 0


def blocks_of(
    info: PeerInfo, tables: Tables, first_tokens: Sequence[int], num_tokens: int
) -> tuple[GrantedBlock, ...]:
    """The blocks of a sequence that are granted, group by group."""
    size = info.block_size
    return tuple(
        GrantedBlock(
            logical=logical_block(group, index),
            block_id=BlockId(table[index]),
            generation=0,
            valid_tokens=min(size, num_tokens - index * size),
        )
        for group, (table, first) in enumerate(zip(tables, first_tokens, strict=True))
        for index in range(first // size, -(-num_tokens // size))
    )


def places_of(tables: Tables, first_tokens: Sequence[int], block_size: int) -> list[BlockId]:
    """Where a worker with these tables wants what is missing, group by group."""
    return [
        BlockId(block_id)
        for table, first in zip(tables, first_tokens, strict=True)
        for block_id in table[first // block_size :]
    ]


def _start(shape: BlockShape, layer: int, kind: int, offset: int, head: int) -> int:
    row = ((layer * 2 + kind) * shape.block_size + offset) * shape.num_heads + head
    return row * shape.head_bytes
