"""Seats: one turn at a time, never more than allowed, an idle group for so long and no longer."""

import asyncio

from kv_transfer.transports.pair_table import PairLimits, PairTable
from tests.fakes.until import until


class FakeGroup:
    """Counts how often it was closed; closing takes a turn of the loop."""

    def __init__(self):
        self.closed = 0

    async def close(self):
        await asyncio.sleep(0)
        self.closed += 1


def make_table(**limits):
    return PairTable(PairLimits(**limits))


async def seated(table, peer):
    """A group that idles on the peer's seat."""
    seat = await table.take(peer)
    seat.group = FakeGroup()
    table.leave(seat)
    return seat.group


async def test_a_group_is_kept_for_the_next_turn():
    table = make_table()
    group = await seated(table, "p")
    assert (await table.take("p")).group is group
    assert group.closed == 0


async def test_a_taken_seat_is_waited_for_in_order():
    table = make_table()
    seat = await table.take("p")
    turns = []

    async def turn(name):
        mine = await table.take("p")
        turns.append(name)
        table.leave(mine)

    waiting = [asyncio.create_task(turn(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert turns == []
    table.leave(seat)
    await asyncio.gather(*waiting)
    assert turns == ["a", "b", "c"]


async def test_a_lost_peer_keeps_no_idle_group_and_one_in_use_stays():
    table = make_table()
    idle, other = await seated(table, "lost"), await seated(table, "other")
    await table.forget("lost")
    assert (idle.closed, other.closed, len(table)) == (1, 0, 1)
    await table.take("other")
    await table.forget("other")
    await table.forget("nobody")
    assert (other.closed, len(table)) == (0, 1)


async def test_a_waiter_that_is_cancelled_leaves_no_trace():
    table = make_table()
    seat = await table.take("p")
    waiting = asyncio.create_task(table.take("p"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    table.leave(seat)
    assert len(table) == 0
    await asyncio.wait_for(table.take("p"), 1)


async def test_the_least_recently_used_idle_group_makes_room():
    table = make_table(max_pairs=2)
    first, second = await seated(table, "first"), await seated(table, "second")
    table.leave(await table.take("first"))
    await table.take("third")
    assert len(table) == 2
    assert (first.closed, second.closed) == (0, 1)


async def test_a_group_in_use_is_never_evicted():
    """F11: who needs room waits until somebody is done."""
    table = make_table(max_pairs=1)
    seat = await table.take("p")
    seat.group = group = FakeGroup()
    other = asyncio.create_task(table.take("q"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not other.done()
    assert group.closed == 0
    table.leave(seat)
    await asyncio.wait_for(other, 1)
    assert group.closed == 1
    assert len(table) == 1


async def test_a_discarded_seat_is_free_once_its_group_is_closed():
    table = make_table()
    seat = await table.take("p")
    seat.group = group = FakeGroup()
    waiting = asyncio.create_task(table.take("p"))
    await table.discard(seat)
    assert group.closed == 1
    assert (await waiting).group is None


async def test_a_group_that_idles_for_too_long_is_closed():
    """F50: also that of a peer that died without a word."""
    table = make_table(idle_s=0.0)
    group = await seated(table, "p")
    await until(lambda: group.closed == 1 and len(table) == 0)


async def test_closing_ends_all_groups_once_also_those_that_are_ending():
    table = make_table(idle_s=0.0)
    groups = [await seated(table, name) for name in "pqr"]
    await asyncio.sleep(0)  # the first ones may be at their end already
    await table.close()
    assert [group.closed for group in groups] == [1, 1, 1]
    assert len(table) == 0


async def test_an_idle_group_that_cannot_be_closed_is_told_of_and_keeps_no_place(caplog):
    class Stubborn(FakeGroup):
        async def close(self):
            raise RuntimeError("INV-FENCE: it cannot be aborted")

    table = make_table(idle_s=0.0)
    seat = await table.take("a")
    seat.group = Stubborn()
    table.leave(seat)
    await until(lambda: "a group was not closed" in caplog.text)
    assert len(table) == 0
    await table.close()


async def test_epochs_grow():
    table = make_table()
    epochs = [table.next_epoch() for _ in range(3)]
    assert epochs == sorted(set(epochs))
    assert epochs[0] > 0


async def test_room_is_made_for_each_of_many_at_once():
    table = make_table(max_pairs=2)
    most = 0

    async def turns(peer):
        nonlocal most
        for _ in range(5):
            seat = await table.take(peer)
            seat.group = seat.group or FakeGroup()
            most = max(most, len(table))
            await asyncio.sleep(0)
            table.leave(seat)

    await asyncio.gather(*(turns(f"p{i}") for i in range(8)))
    assert most == 2
