"""Which peers this end is paired with: one group a peer, one turn at a time, so many in all.

A seat is a peer's place in the table, with its group once there is one. Whoever takes a seat has it
alone until leaving it; a taken seat is never evicted. An idle one is closed when it has been so for
long, as that of a peer that died without a word will be, or when its place is needed: the least
recently used one first. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A group, as the table needs it."""

    async def close(self) -> None:
        """Fence and release it; safe to repeat."""


Group = TypeVar("Group", bound=Closable)


MAX_PAIRS = 16
"""Groups that one end keeps at most, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLimits:
    """How many groups one end of a transport keeps, and for how long."""

    max_pairs: int = MAX_PAIRS
    idle_s: float = 30.0
    """An unused group is closed after this."""
    pair_s: float = 10.0
    """For getting a turn from the peer, making a new group included."""


@dataclass(slots=True, eq=False)
class Seat(Generic[Group]):
    """One peer's place; its fields belong to whoever has taken it."""

    peer: str
    """Incarnation."""
    epoch: int = 0
    """Of the group that was made last."""
    group: Group | None = None
    is_taken: bool = True
    expiry: asyncio.TimerHandle | None = None


class PairTable(Generic[Group]):
    """The seats of one end."""

    def __init__(self, limits: PairLimits) -> None:
        """An empty table."""
        self._limits = limits
        self._seats: dict[str, Seat[Group]] = {}  # least recently used first
        self._waiting: list[asyncio.Future[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._epochs = itertools.count(1)

    def __len__(self) -> int:
        return len(self._seats)

    def next_epoch(self) -> int:
        """Above that of every group that this end has asked for."""
        return next(self._epochs)

    async def take(self, peer: str) -> Seat[Group]:
        """The peer's seat, alone; waits while it is taken, or while every seat is.

        `leave` or `discard` must follow.
        """
        while True:
            seat = self._seats.get(peer)
            if seat is not None and not seat.is_taken:
                return self._taken(seat)
            if seat is None and len(self._seats) < self._limits.max_pairs:
                self._seats[peer] = Seat(peer)
                return self._seats[peer]
            if seat is None and (idle := self._least_recent_idle()) is not None:
                await self._evict(idle)
            else:
                await self._change()

    def leave(self, seat: Seat[Group]) -> None:
        """Let others have the seat; without a group it is gone."""
        seat.is_taken = False
        del self._seats[seat.peer]
        if seat.group is not None:
            self._seats[seat.peer] = seat  # now the most recent one
            seat.expiry = asyncio.get_running_loop().call_later(
                self._limits.idle_s, self._expire, seat
            )
        self._wake()

    async def discard(self, seat: Seat[Group]) -> None:
        """Close the group of a taken seat, and give the seat up."""
        try:
            await self.drop_group(seat)
        finally:
            self.leave(seat)

    async def forget(self, peer: str) -> None:
        """Close a peer's group unless it is in use: whoever uses it will notice by itself."""
        seat = self._seats.get(peer)
        if seat is not None and not seat.is_taken:
            await self._evict(seat)

    async def drop_group(self, seat: Seat[Group]) -> None:
        """Close the group of a taken seat, which stays taken."""
        group, seat.group = seat.group, None
        if group is not None:
            await group.close()

    async def close(self) -> None:
        """Close every idle group; no seat may be taken."""
        while (idle := self._least_recent_idle()) is not None:
            self._expire(idle)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _taken(self, seat: Seat[Group]) -> Seat[Group]:
        seat.is_taken = True
        if seat.expiry is not None:
            seat.expiry.cancel()
            seat.expiry = None
        return seat

    def _least_recent_idle(self) -> Seat[Group] | None:
        return next((seat for seat in self._seats.values() if not seat.is_taken), None)

    async def _evict(self, seat: Seat[Group]) -> None:
        # Taken meanwhile, so that the place counts until the group is gone.
        await self.discard(self._taken(seat))

    def _expire(self, seat: Seat[Group]) -> None:
        self._start(self._evict(self._taken(seat)))

    def _start(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._evicted)

    def _evicted(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a group was not closed", exc_info=error)

    async def _change(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        finally:
            self._waiting.remove(waiting)

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
