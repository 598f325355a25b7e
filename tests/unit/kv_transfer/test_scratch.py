"""Scratch blocks are one transfer's from when they are lent until they are given back."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.scratch import ScratchArena, ScratchArenas
from kv_transfer.transport import LinkRefusedError
from kv_transfer.transports.nixl_agent import address_of
from kv_transfer.workspace import HostWorkspace


def lending(num_lots: int, *, of: int) -> ScratchArena:
    """An arena of so many lots of so many blocks."""
    return ScratchArena(HostWorkspace().blocks(num_lots * of, 8), blocks_per_lot=of)


async def turn() -> None:
    """Let others of this loop go on until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_block_is_lent_twice_before_it_was_given_back():
    arena = lending(3, of=2)

    lots = [await arena.borrow() for _ in range(3)]

    assert sorted(block for lot in lots for block in lot) == list(range(arena.memory.num_blocks))
    assert arena.free_lots == 0
    arena.give_back(lots[1])
    assert await arena.borrow() == lots[1]


async def test_who_finds_no_lot_waits_for_one_in_the_order_of_coming():
    arena = lending(1, of=2)
    lot = await arena.borrow()
    first, second = (asyncio.create_task(arena.borrow()) for _ in range(2))
    await turn()
    assert not first.done()

    arena.give_back(lot)

    assert await first == lot
    await turn()
    assert not second.done()
    arena.give_back(lot)
    assert await second == lot


async def test_who_comes_later_does_not_pass_who_waits():
    arena = lending(1, of=2)
    lot = await arena.borrow()
    waiting = asyncio.create_task(arena.borrow())
    await turn()
    arena.give_back(lot)
    later = asyncio.create_task(arena.borrow())
    assert await waiting == lot
    assert not later.done()
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
    arena.give_back(lot)
    assert arena.free_lots == 1


async def test_when_the_last_lot_is_lost_nobody_waits_for_one():
    arena = lending(2, of=2)
    first, second = [await arena.borrow() for _ in range(2)]
    waiting = [asyncio.create_task(arena.borrow()) for _ in range(2)]
    await turn()
    arena.lose()  # first
    await turn()
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    await turn()

    arena.lose()

    with pytest.raises(LinkRefusedError, match="fence of all scratch blocks is broken"):
        await waiting[1]
    with pytest.raises(LinkRefusedError, match="fence of all scratch blocks is broken"):
        await arena.borrow()
    assert {first, second} == {(0, 1), (2, 3)}


async def test_who_gives_up_waiting_takes_no_lot_along():
    arena = lending(1, of=2)
    lot = await arena.borrow()
    waiting = asyncio.create_task(arena.borrow())
    await turn()
    arena.give_back(lot)
    waiting.cancel()  # in the very moment in which it is there
    await asyncio.gather(waiting, return_exceptions=True)
    assert arena.free_lots == 1


def test_blocks_lie_side_by_side():
    """As NIXL registers them."""
    arena = lending(2, of=2)
    addresses = [address_of(arena.memory.block(BlockId(block))) for block in range(4)]
    assert addresses == [addresses[0] + 8 * block for block in range(4)]
    assert [arena.memory.block(BlockId(block)).nbytes for block in range(4)] == [8] * 4


def test_each_size_has_one_arena_for_good():
    arenas = ScratchArenas(lot_bytes=64, arena_bytes=256)
    small, large = arenas.of(10), arenas.of(100)
    assert arenas.of(10) is small
    assert (small.free_lots, small.memory.num_blocks) == (4, 24)
    assert (large.free_lots, large.memory.num_blocks) == (2, 2)


def test_memory_is_bounded_and_what_is_beyond_is_refused():
    arenas = ScratchArenas(lot_bytes=64, arena_bytes=256, max_arenas=2)
    with pytest.raises(LinkRefusedError, match="block of 257 bytes cannot be repacked in 256"):
        arenas.of(257)
    for size in (256, 7):
        arena = arenas.of(size)
        assert arena.memory.num_blocks * arena.memory.bytes_per_block <= 256
    with pytest.raises(LinkRefusedError, match=r"9 bytes .* beside those of \[7, 256\]"):
        arenas.of(9)
    assert arenas.of(7).free_lots > 0
