"""Repacked pools, byte for byte those of a reference that copies head by head, token by token."""

from __future__ import annotations

import asyncio
import random
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.geometry import BlockId, ceil_div, logical_block
from kv_transfer.handoff import GrantedBlock
from kv_transfer.landing import Repacked
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape
from kv_transfer.scratch import ScratchArena
from kv_transfer.workspace import HostWorkspace
from tests.fakes.block_memory import ByteMemory

SPLITS = (1, 2, 4)


@st.composite
def layouts(draw):
    """Source ranks' shapes, our own shape, a token range, and a seed for the bytes."""
    layers, head_bytes = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 6)))
    heads = 4 * draw(st.integers(1, 2))

    def rank(size, of, number):
        return BlockShape(
            num_layers=layers,
            block_size=size,
            num_heads=heads // of,
            head_bytes=head_bytes,
            first_head=number * heads // of,
        )

    own_size = draw(st.integers(1, 9))
    source_split, own_split = draw(st.sampled_from(SPLITS)), draw(st.sampled_from(SPLITS))
    num_tokens = draw(st.integers(1, 40))
    own = rank(own_size, own_split, draw(st.integers(0, own_split - 1)))
    sources = [
        rank(draw(st.integers(1, 9)), source_split, number) for number in range(source_split)
    ]
    first_token = draw(st.integers(0, num_tokens - 1))
    return sources, own, first_token, num_tokens, draw(st.integers(0, 2**32))


def filled(num_blocks, shape, seed):
    """A pool whose every byte is random."""
    memory = ByteMemory(num_blocks, shape.bytes_per_block)
    memory.fill(seed)
    return memory


def shuffled(number, rng):
    return [BlockId(i) for i in rng.sample(range(number + 3), number)]


def head_of(memory, table, shape, token, layer, kind, head):
    """The bytes of one head of one token."""
    block, offset = divmod(token, shape.block_size)
    row = ((layer * 2 + kind) * shape.block_size + offset) * shape.num_heads + head
    start = row * shape.head_bytes
    return memory.block(table[block])[start : start + shape.head_bytes]


def repack_one_by_one(sources, pools, tables, own, memory, table, first_token, num_tokens):
    """The reference: for each head of ours, of whichever rank has it.

    Both sides have what they have from the block on that first_token is in; where a source has
    nothing for the beginning of our block, there are zeros.
    """
    begin = first_token // own.block_size * own.block_size
    places = product(
        range(begin, num_tokens), range(own.num_layers), range(2), range(own.num_heads)
    )
    for token, layer, kind, head in places:
        rank, there = divmod(own.first_head + head, sources[0].num_heads)
        brought = first_token // sources[rank].block_size * sources[rank].block_size
        head_of(memory, table, own, token, layer, kind, head)[:] = (
            head_of(pools[rank], tables[rank], sources[rank], token, layer, kind, there)
            if token >= brought
            else bytes(own.head_bytes)
        )


def repack(source, pool, source_table, own, memory, table, first_token, num_tokens):
    """As a transfer from one rank does it; how many source blocks were fetched."""
    landing = Repacked(
        memory,
        table[first_token // own.block_size :],
        ScratchArena(HostWorkspace().blocks(8, source.bytes_per_block), blocks_per_lot=8),
        HostWorkspace(),
        source=source,
        own=own,
        first_tokens=(first_token,),
        num_tokens=num_tokens,
    )
    first = first_token // source.block_size
    blocks = tuple(
        GrantedBlock(
            logical=logical_block(0, index),
            block_id=source_table[index],
            generation=0,
            valid_tokens=min(source.block_size, num_tokens - index * source.block_size),
        )
        for index in range(first, ceil_div(num_tokens, source.block_size))
    )
    asyncio.run(landing.ready())
    fetched = 0
    for part, places in landing.parts(Fetch(blocks, {})):
        for block in part:  # what a transport does
            landing.memory.block(places[block.logical])[:] = pool.block(block.block_id)
        for block in part:
            landing.place(block)
        fetched += len(part)
    assert fetched == len(blocks)


def shares_heads(source, own):
    return (
        source.first_head < own.first_head + own.num_heads
        and own.first_head < source.first_head + source.num_heads
    )


@settings(max_examples=150)
@given(layouts())
def test_every_byte_is_where_the_reference_puts_it(case):
    sources, own, first_token, num_tokens, seed = case
    rng = random.Random(seed)
    num_own = ceil_div(num_tokens, own.block_size)
    lengths = [ceil_div(num_tokens, shape.block_size) for shape in sources]
    tables = [shuffled(length, rng) for length in lengths]
    pools = [
        filled(length + 3, shape, seed + i)
        for i, (length, shape) in enumerate(zip(lengths, sources, strict=True), 1)
    ]
    table = shuffled(num_own, rng)
    memory, expected = (filled(num_own + 3, own, seed) for _ in range(2))

    for source, pool, source_table in zip(sources, pools, tables, strict=True):
        if shares_heads(source, own):
            repack(source, pool, source_table, own, memory, table, first_token, num_tokens)
    repack_one_by_one(sources, pools, tables, own, expected, table, first_token, num_tokens)

    for block_id in range(memory.num_blocks):
        assert memory.block(BlockId(block_id)) == expected.block(BlockId(block_id))
