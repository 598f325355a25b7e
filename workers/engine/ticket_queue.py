"""Who waits for blocks, and in which order: one bounded queue, owned by the scheduler.

Priority with aging: one level of priority is worth `aging_s` seconds of waiting. Everybody ages
at the same rate, so the order of two tickets never changes while they wait, and it is decided by
one number that is known on arrival: `enqueued_at + priority * aging_s`. With priorities between
`low` and `high`, a ticket is overtaken by nobody who comes more than `(high - low) * aging_s`
seconds after it: nothing starves.

Only the head may be served, so what is freed accrues to it, however much it needs. Deadlines are
the scheduler's: it removes what has expired, here as in every other state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.engine.step import SequenceId
from workers.errors import QueueFullError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One sequence's place in the queue."""

    sequence_id: SequenceId
    num_blocks: int
    """Needed all at once."""
    enqueued_at: float
    """Monotonic seconds."""
    priority: int = 0
    """Lower is served earlier."""


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """A ticket with its sort key; the arrival number keeps equals first in, first out."""

    rank: float
    arrival: int
    ticket: Ticket = field(compare=False)


class TicketQueue:
    """Tickets in the order in which they are served."""

    def __init__(self, *, limit: int, aging_s: float) -> None:
        self._limit = limit
        self._aging_s = aging_s
        self._places: list[_Place] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets, head first."""
        return (place.ticket for place in self._places)

    @property
    def head(self) -> Ticket | None:
        """The ticket that is served next, or None."""
        return self._places[0].ticket if self._places else None

    def push(self, ticket: Ticket) -> None:
        """Put a ticket in its place; raises `QueueFullError` at the limit."""
        if len(self._places) >= self._limit:
            raise QueueFullError(
                f"{len(self._places)} requests wait already, the limit is {self._limit}; "
                f"this one needs {ticket.num_blocks} blocks"
            )
        rank = ticket.enqueued_at + ticket.priority * self._aging_s
        insort(self._places, _Place(rank, self._arrivals, ticket))
        self._arrivals += 1

    def pop(self) -> Ticket:
        """Take the head off; raises IndexError if nobody waits."""
        return self._places.pop(0).ticket

    def remove(self, sequence_id: SequenceId) -> bool:
        """Take a ticket out wherever it is; False if there is none."""
        for index, place in enumerate(self._places):
            if place.ticket.sequence_id == sequence_id:
                del self._places[index]
                return True
        return False

    def check_invariants(self) -> None:
        """Raise AssertionError if the queue is out of order, too long, or names anyone twice."""
        ids = [ticket.sequence_id for ticket in self]
        assert len(ids) <= self._limit, f"INV-QUEUE: {len(ids)} tickets, the limit is {self._limit}"
        assert len(ids) == len(set(ids)), "INV-QUEUE: a sequence has two tickets"
        assert self._places == sorted(self._places), "INV-QUEUE: the tickets are out of order"
