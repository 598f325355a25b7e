"""How fetched blocks reach their places: at once, or by way of scratch blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.geometry import BlockId, logical_block
from kv_transfer.landing import InPlace, Repacked
from kv_transfer.protocol import Fetch
from kv_transfer.repack import BlockShape
from kv_transfer.scratch import ScratchArena
from kv_transfer.workspace import HostWorkspace
from tests.fakes.block_memory import ByteMemory, granted_blocks

OWN = BlockShape(num_layers=1, block_size=4, num_heads=1, head_bytes=2)
SOURCE = replace(OWN, block_size=2)


def arena_of(shape, *, num_lots=1):
    memory = HostWorkspace().blocks(num_lots * 8, shape.bytes_per_block)
    return ScratchArena(memory, blocks_per_lot=8)


def repacked(memory, placement, num_tokens, *, first_tokens=(0,), source=SOURCE, arena=None):
    return Repacked(
        memory,
        placement,
        arena or arena_of(source),
        HostWorkspace(),
        source=source,
        own=OWN,
        first_tokens=first_tokens,
        num_tokens=num_tokens,
    )


def test_blocks_of_our_shape_are_fetched_together_into_their_places():
    memory = ByteMemory(4, OWN.bytes_per_block)
    blocks = granted_blocks(8, 4, [0, 1])
    placement = {blocks[0].logical: BlockId(3), blocks[1].logical: BlockId(1)}
    landing = InPlace(memory)

    assert landing.memory is memory
    assert list(landing.parts(Fetch(blocks, placement))) == [(blocks, placement)]


async def test_blocks_of_another_shape_are_fetched_as_many_at_a_time_as_were_lent():
    """However long the prompt is, scratch memory is bounded, and not another transfer's."""
    arena = arena_of(SOURCE, num_lots=2)
    landing = repacked(ByteMemory(9, OWN.bytes_per_block), list(range(9)), 36, arena=arena)
    others = await arena.borrow()
    blocks = granted_blocks(36, 2, list(range(18)))

    await landing.ready()
    parts = list(landing.parts(Fetch(blocks, {})))

    assert [block for part, _ in parts for block in part] == list(blocks)
    assert [len(part) for part, _ in parts] == [8, 8, 2]
    places = [list(placement.values()) for _, placement in parts]
    assert all(len(set(used)) == len(used) for used in places)
    assert all(set(used).isdisjoint(others) for used in places)


async def test_a_transfer_is_lent_scratch_once_and_gives_it_back_once():
    arena = arena_of(SOURCE)
    landing = repacked(ByteMemory(1, OWN.bytes_per_block), [BlockId(0)], 4, arena=arena)
    landing.fenced()  # nothing was fetched
    assert arena.free_lots == 1

    for _ in range(2):
        await landing.ready()
        assert arena.free_lots == 0

    for _ in range(2):
        landing.fenced()
        assert arena.free_lots == 1


async def test_nothing_is_in_its_place_before_it_is_placed():
    memory = ByteMemory(1, OWN.bytes_per_block)
    landing = repacked(memory, [BlockId(0)], 4)
    await landing.ready()
    ((blocks, places),) = landing.parts(Fetch(granted_blocks(4, 2, [0, 1]), {}))
    for number, block in enumerate(blocks, 1):
        landing.memory.block(places[block.logical])[:] = bytes([number]) * SOURCE.bytes_per_block
    assert bytes(memory.block(BlockId(0))) == bytes(OWN.bytes_per_block)

    landing.place(blocks[1])

    key = b"\0\0\0\0\2\2\2\2"
    assert bytes(memory.block(BlockId(0))) == key + key


async def test_each_group_has_its_own_first_block_and_its_own_places():
    """Two groups of one layer, the second with a window; ranks of two heads, ours has the first."""
    memory = ByteMemory(3, OWN.bytes_per_block)
    source = replace(OWN, num_heads=2)
    landing = repacked(memory, [2, 0, 1], 8, first_tokens=(0, 4), source=source)
    names = [logical_block(0, 0), logical_block(0, 1), logical_block(1, 1)]
    granted = [
        replace(block, logical=name)
        for block, name in zip(granted_blocks(12, 4, [0, 1, 2]), names, strict=True)
    ]
    await landing.ready()
    ((blocks, places),) = landing.parts(Fetch(tuple(granted), {}))
    for number, block in enumerate(blocks, 1):
        landing.memory.block(places[block.logical])[:] = bytes([number, number, 9, 9]) * 8
        landing.place(block)

    first_bytes = [memory.block(BlockId(place))[:] for place in (2, 0, 1)]
    assert first_bytes == [bytes([number]) * OWN.bytes_per_block for number in (1, 2, 3)]


@pytest.mark.parametrize(("first_token", "num_lacking"), [(8, 0), (9, 0), (10, 2), (11, 2)])
async def test_what_no_source_has_behind_a_window_is_zero_and_nothing_else_is(
    first_token, num_lacking
):
    """Our block of the tokens 8 to 11, from blocks of 2: what is before is not the source's."""
    memory = ByteMemory(1, OWN.bytes_per_block)
    memory.block(BlockId(0))[:] = b"\xee" * OWN.bytes_per_block
    landing = repacked(memory, [BlockId(0)], 12, first_tokens=(first_token,))
    assert set(memory.block(BlockId(0))) == {0xEE}

    await landing.ready()

    key = bytes(2 * num_lacking) + b"\xee" * 2 * (4 - num_lacking)
    assert bytes(memory.block(BlockId(0))) == key + key


@pytest.mark.parametrize("placement", [[0], [0, 0]])
def test_a_placement_that_is_short_or_names_a_block_twice_is_refused(placement):
    with pytest.raises(ValueError, match="placement"):
        repacked(ByteMemory(2, OWN.bytes_per_block), placement, 8)
