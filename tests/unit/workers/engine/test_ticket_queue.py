import pytest

from workers.engine.step import SequenceId
from workers.engine.ticket_queue import Ticket, TicketQueue
from workers.errors import QueueFullError


def make_ticket(number: int, *, at: float = 0.0, priority: int = 0, blocks: int = 1) -> Ticket:
    return Ticket(
        sequence_id=SequenceId(number), num_blocks=blocks, enqueued_at=at, priority=priority
    )


def make_queue(*tickets: Ticket, limit: int = 8) -> TicketQueue:
    queue = TicketQueue(limit=limit, aging_s=10.0)
    for ticket in tickets:
        queue.push(ticket)
    return queue


def order(queue: TicketQueue) -> list[int]:
    return [ticket.sequence_id for ticket in queue]


def test_equals_are_served_first_in_first_out():
    assert order(make_queue(make_ticket(2), make_ticket(1), make_ticket(3))) == [2, 1, 3]


def test_lower_priority_value_goes_before_an_earlier_arrival():
    assert order(make_queue(make_ticket(1), make_ticket(2, at=9.0, priority=-1))) == [2, 1]


def test_waiting_long_enough_outweighs_priority():
    assert order(make_queue(make_ticket(1), make_ticket(2, at=11.0, priority=-1))) == [1, 2]


def test_push_at_the_limit_is_refused_with_the_numbers():
    queue = make_queue(make_ticket(1), limit=1)
    with pytest.raises(QueueFullError, match="1 requests wait already, the limit is 1"):
        queue.push(make_ticket(2))
    assert order(queue) == [1]


def test_head_is_what_pop_takes():
    queue = make_queue(make_ticket(1), make_ticket(2))
    head = queue.head
    assert queue.pop() is head
    assert order(queue) == [2]


def test_empty_queue_has_no_head():
    assert make_queue().head is None


def test_pop_of_an_empty_queue_is_an_error():
    with pytest.raises(IndexError):
        make_queue().pop()


def test_remove_takes_out_from_the_middle():
    queue = make_queue(make_ticket(1), make_ticket(2), make_ticket(3))
    assert queue.remove(SequenceId(2))
    assert order(queue) == [1, 3]


def test_remove_of_a_stranger_changes_nothing():
    queue = make_queue(make_ticket(1))
    assert not queue.remove(SequenceId(2))
    assert len(queue) == 1


def tamper_order(queue: TicketQueue) -> None:
    queue._places.reverse()


def tamper_twice(queue: TicketQueue) -> None:
    queue.push(make_ticket(1))


def tamper_limit(queue: TicketQueue) -> None:
    queue._limit = 1


@pytest.mark.parametrize("tamper", [tamper_order, tamper_twice, tamper_limit])
def test_check_invariants_sees_a_queue_that_contradicts_itself(tamper):
    queue = make_queue(make_ticket(1), make_ticket(2))
    queue.check_invariants()
    tamper(queue)
    with pytest.raises(AssertionError, match="INV-QUEUE"):
        queue.check_invariants()
