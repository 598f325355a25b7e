"""Who is let in where a listener is full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kv_transfer import doorkeeper
from kv_transfer.doorkeeper import Doorkeeper


@dataclass(slots=True, kw_only=True)
class Guest:
    """A connection."""

    is_admitted: bool = False


class House:
    """A door of two places, with guests whose tasks last until they are told to go."""

    def __init__(self) -> None:
        self.num_strangers = 0
        self.door: Doorkeeper[Guest] = Doorkeeper(on_stranger=self._count)

    def enter(self, *, is_admitted: bool) -> asyncio.Task[None]:
        async def stay() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(stay())
        self.door.let_in(task, Guest(is_admitted=is_admitted))
        task.add_done_callback(self.door.has_left)
        return task

    def _count(self) -> None:
        self.num_strangers += 1


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(doorkeeper, "MAX_CONNECTIONS", 2)
    made = House()
    yield made
    tasks = made.door.tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(made.door) == 0


async def test_while_there_is_room_nobody_goes(house):
    house.enter(is_admitted=False)
    assert house.door.makes_room()
    assert len(house.door) == 1
    assert house.num_strangers == 0


async def test_the_oldest_stranger_makes_room_and_is_counted(house):
    friend, oldest = house.enter(is_admitted=True), house.enter(is_admitted=False)
    younger = house.enter(is_admitted=False)
    assert house.door.makes_room()
    await asyncio.wait({oldest})
    assert oldest.cancelled()
    assert not friend.done()
    assert not younger.done()
    assert house.num_strangers == 1


async def test_one_that_is_going_already_makes_no_room_again(house):
    house.enter(is_admitted=True)
    house.enter(is_admitted=False)
    assert house.door.makes_room()
    assert not house.door.makes_room()
    assert house.num_strangers == 1


async def test_those_that_proved_themselves_stay(house):
    tasks = [house.enter(is_admitted=True) for _ in range(2)]
    assert not house.door.makes_room()
    assert house.door.tasks == tuple(tasks)
    assert [guest.is_admitted for guest in house.door.connections] == [True, True]
    assert house.num_strangers == 0
