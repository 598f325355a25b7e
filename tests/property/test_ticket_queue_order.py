"""Any order of arrivals and departures: who is served, and that nobody starves."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.step import SequenceId
from workers.engine.ticket_queue import Ticket, TicketQueue
from workers.errors import QueueFullError

LIMIT = 6
AGING_S = 10.0
PRIORITIES = st.integers(-2, 2)


def effective(ticket: Ticket, now: float) -> float:
    """A ticket's priority improved by its waiting, in seconds; lower goes first."""
    return ticket.priority * AGING_S - (now - ticket.enqueued_at)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = TicketQueue(limit=LIMIT, aging_s=AGING_S)
        self.waiting: list[Ticket] = []
        self.now = 0.0
        self.arrivals = 0

    @rule(priority=PRIORITIES)
    def push(self, priority: int) -> None:
        ticket = Ticket(
            sequence_id=SequenceId(self.arrivals),
            num_blocks=1,
            enqueued_at=self.now,
            priority=priority,
        )
        self.arrivals += 1
        try:
            self.queue.push(ticket)
        except QueueFullError:
            assert len(self.waiting) == LIMIT
        else:
            self.waiting.append(ticket)

    @rule(seconds=st.integers(0, 40))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self) -> None:
        best = min(effective(ticket, self.now) for ticket in self.waiting)
        # The first of the best: model ties by arrival, which is the list's order.
        expected = next(t for t in self.waiting if effective(t, self.now) == best)
        assert self.queue.pop() is expected
        self.waiting.remove(expected)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.arrivals))
        found = [ticket for ticket in self.waiting if ticket.sequence_id == number]
        assert self.queue.remove(SequenceId(number)) == bool(found)
        self.waiting = [ticket for ticket in self.waiting if ticket not in found]

    @invariant()
    def queue_is_consistent(self) -> None:
        self.queue.check_invariants()
        assert {ticket.sequence_id for ticket in self.queue} == {
            ticket.sequence_id for ticket in self.waiting
        }


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_ticket_queue_in_any_order = QueueMachine.TestCase


@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 5)), min_size=1, max_size=40))
@settings(deadline=None)
def test_nobody_is_overtaken_by_who_comes_after_the_aging_bound(arrivals):
    """Priorities differ by 4 at most: 40 seconds of waiting outweigh every priority."""
    queue = TicketQueue(limit=len(arrivals), aging_s=AGING_S)
    now = 0.0
    for number, (priority, gap_s) in enumerate(arrivals):
        now += gap_s
        queue.push(
            Ticket(sequence_id=SequenceId(number), num_blocks=1, enqueued_at=now, priority=priority)
        )
    served = [queue.pop() for _ in arrivals]
    for index, ticket in enumerate(served):
        for later in served[index + 1 :]:
            assert ticket.enqueued_at - later.enqueued_at <= 4 * AGING_S
