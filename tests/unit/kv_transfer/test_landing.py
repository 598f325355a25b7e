"""How fetched blocks reach their places: at once, or by way of scratch blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.landing import InPlace, Repacked
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape
from tests.fakes.block_memory import ByteMemory, granted_blocks

OWN = BlockShape(num_layers=1, block_size=4, num_heads=1, head_bytes=2)
SOURCE = replace(OWN, block_size=2)


def repacked(memory, placement, num_tokens):
    return Repacked(memory, placement, source=SOURCE, own=OWN, first_token=0, num_tokens=num_tokens)


def test_blocks_of_our_shape_are_fetched_together_into_their_places():
    memory = ByteMemory(4, OWN.bytes_per_block)
    blocks = granted_blocks(8, 4, [0, 1])
    placement = {blocks[0].logical: BlockId(3), blocks[1].logical: BlockId(1)}
    landing = InPlace(memory)

    assert landing.memory is memory
    assert list(landing.parts(Fetch(blocks, placement))) == [(blocks, placement)]


def test_blocks_of_another_shape_are_fetched_a_few_at_a_time():
    """However long the prompt is, scratch memory is bounded."""
    landing = repacked(ByteMemory(8, OWN.bytes_per_block), list(range(8)), 32)
    blocks = granted_blocks(32, 2, list(range(16)))

    parts = list(landing.parts(Fetch(blocks, {})))

    assert [block for part, _ in parts for block in part] == list(blocks)
    assert max(len(part) for part, _ in parts) == landing.memory.num_blocks < len(blocks)
    assert landing.memory.bytes_per_block == SOURCE.bytes_per_block
    assert landing.memory.region is None


def test_nothing_is_in_its_place_before_it_is_placed():
    memory = ByteMemory(1, OWN.bytes_per_block)
    landing = repacked(memory, [BlockId(0)], 4)
    ((blocks, places),) = landing.parts(Fetch(granted_blocks(4, 2, [0, 1]), {}))
    for number, block in enumerate(blocks, 1):
        landing.memory.block(places[block.logical])[:] = bytes([number]) * SOURCE.bytes_per_block
    assert bytes(memory.block(BlockId(0))) == bytes(OWN.bytes_per_block)

    landing.place(blocks[1])

    key = b"\0\0\0\0\2\2\2\2"
    assert bytes(memory.block(BlockId(0))) == key + key


@pytest.mark.parametrize("placement", [[0], [0, 0]])
def test_a_placement_that_is_short_or_names_a_block_twice_is_refused(placement):
    with pytest.raises(ValueError, match="placement"):
        repacked(ByteMemory(2, OWN.bytes_per_block), placement, 8)
