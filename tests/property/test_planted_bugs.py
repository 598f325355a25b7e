"""The property machines can fail: small bugs of every kind, put into the real classes, are found.

Each bug is one that a change could bring in and that its own class would not notice. The machine
that covers the class must find it, by an assertion or by the class refusing what it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import group_and_index
from kv_transfer.lease import LeaseTable
from kv_transfer.protocol import ReceiverProtocol
from kv_transfer.transport import CorruptTransferError, TransferError
from tests.property import test_receiver_protocol_states as receiver_properties
from tests.property.test_block_pool_states import PoolMachine
from tests.property.test_coverage_states import CoverageMachine
from tests.property.test_lease_states import LeaseMachine
from tests.property.test_receiver_protocol_states import ProtocolMachine
from tests.property.test_scheduler_states import SchedulerMachine
from tests.property.test_ticket_queue_order import QueueMachine
from workers.engine.block_pool import BlockPool, BlockStateError
from workers.engine.events import TERMINAL_EVENTS
from workers.engine.holdings import Holdings
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import IllegalTransitionError, SequenceSpec
from workers.engine.ticket_queue import TicketQueue

pytestmark = pytest.mark.timeout(600)  # a rare interleaving takes a few hundred examples

Plant = Callable[[pytest.MonkeyPatch], None]

FINDING = settings(
    max_examples=300,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # to find is enough: the smallest example is for people
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
FOUND = (AssertionError, BlockStateError, IllegalTransitionError, TransferError)
"""Not a TypeError: that would be the plant's own mistake."""


# -- pool ---------------------------------------------------------------------------------------


def generation_stays_when_a_block_is_freed(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def forget(pool, block_ids):
        before = list(pool.generations)
        release(pool, block_ids)
        pool.generations[:] = before

    patch.setattr(BlockPool, "release", forget)


def one_block_is_handed_out_twice(patch: pytest.MonkeyPatch) -> None:
    reserve = BlockPool.reserve

    def repeat(pool, num_blocks, **hits):
        block_ids = reserve(pool, num_blocks, **hits)
        return block_ids and (*block_ids[:-1], block_ids[0])

    patch.setattr(BlockPool, "reserve", repeat)


def what_is_left_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    reserve = BlockPool.reserve

    def some(pool, num_blocks, **hits):
        return reserve(pool, max(1, min(num_blocks, pool.num_available)), **hits)

    patch.setattr(BlockPool, "reserve", some)


def fence_frees_its_blocks(patch: pytest.MonkeyPatch) -> None:
    unquarantine = BlockPool.unquarantine

    def free(pool, block_ids):
        unquarantine(pool, block_ids)
        pool.release(block_ids)

    patch.setattr(BlockPool, "unquarantine", free)


# -- lease --------------------------------------------------------------------------------------


def lease_never_expires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "_expire_if_due", lambda *_: None)


def confirm_looks_at_no_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "_is_untouched", lambda *_: True)


def ended_epoch_may_come_again(patch: pytest.MonkeyPatch) -> None:
    begin = LeaseTable.open

    def forget(table, key, now):
        table._ended.pop(key.transfer_id, None)
        begin(table, key, now)

    patch.setattr(LeaseTable, "open", forget)


def end_is_reported_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "take_ended", lambda table: tuple(table._unreported))


# -- coverage -----------------------------------------------------------------------------------


def block_may_land_twice(patch: pytest.MonkeyPatch) -> None:
    mark = Coverage.mark

    def forgive(coverage, block):
        try:
            mark(coverage, block)
        except CorruptTransferError as error:
            if "twice" not in str(error):
                raise

    patch.setattr(Coverage, "mark", forgive)


def last_block_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    almost = property(lambda coverage: coverage.blocks_landed >= coverage.expected_blocks - 1)
    patch.setattr(Coverage, "is_full", almost)


def block_may_be_short(patch: pytest.MonkeyPatch) -> None:
    check = Coverage.check

    def pad(coverage, block):
        if 0 <= block.logical < coverage.expected_blocks:
            block = replace(block, valid_tokens=coverage.valid_tokens(block.logical))
        check(coverage, block)

    patch.setattr(Coverage, "check", pad)


def every_group_begins_where_the_first_does(patch: pytest.MonkeyPatch) -> None:
    make = Coverage.__init__

    def level(coverage, *, num_tokens, block_size, first_blocks=(0,)):
        first_blocks = first_blocks[:1] * len(first_blocks)
        make(coverage, num_tokens=num_tokens, block_size=block_size, first_blocks=first_blocks)

    patch.setattr(Coverage, "__init__", level)


def last_group_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def others_are_full(coverage):
        last, _ = group_and_index(coverage.expected[-1])
        landed = coverage._has_landed.items()
        others = [done for logical, done in landed if group_and_index(logical)[0] < last]
        return all(others or coverage._has_landed.values())

    patch.setattr(Coverage, "is_full", property(others_are_full))


# -- protocol -----------------------------------------------------------------------------------


def confirm_waits_for_the_last_grant_only(patch: pytest.MonkeyPatch) -> None:
    has_last = property(lambda protocol: protocol.first is not None)
    patch.setattr(ReceiverProtocol, "_is_complete", has_last)


def any_generation_may_land(patch: pytest.MonkeyPatch) -> None:
    take = ReceiverProtocol._take_block

    def trust(protocol, block):
        return take(protocol, protocol._granted.get(block.logical, block))

    patch.setattr(ReceiverProtocol, "_take_block", trust)


# -- scheduler ----------------------------------------------------------------------------------


def output_is_not_reserved(patch: pytest.MonkeyPatch) -> None:
    prompt = property(lambda spec: len(spec.prompt_token_ids))
    patch.setattr(SequenceSpec, "num_reserved_tokens", prompt)


def sequence_ends_twice(patch: pytest.MonkeyPatch) -> None:
    take_events = Scheduler.take_events

    def repeat(scheduler):
        events = take_events(scheduler)
        return events + [event for event in events if isinstance(event, TERMINAL_EVENTS)]

    patch.setattr(Scheduler, "take_events", repeat)


def cancelled_transfer_is_not_fenced(patch: pytest.MonkeyPatch) -> None:
    cancel = Scheduler.cancel

    def free_at_once(scheduler, sequence_id):
        was_live = cancel(scheduler, sequence_id)
        scheduler.fence(sequence_id)
        return was_live

    patch.setattr(Scheduler, "cancel", free_at_once)


def step_in_flight_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holdings, "take_off", lambda *_: None)


def youngest_prompt_goes_first(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def turn_round(scheduler, now):
        scheduler._roster.prefilling.reverse()
        planned = plan(scheduler, now)
        scheduler._roster.prefilling.reverse()
        return planned

    patch.setattr(Scheduler, "plan", turn_round)


# -- ticket queue -------------------------------------------------------------------------------


def priority_counts_for_nothing(patch: pytest.MonkeyPatch) -> None:
    make = TicketQueue.__init__

    def flat(queue, *, limit, aging_s):
        make(queue, limit=limit, aging_s=0.0)

    patch.setattr(TicketQueue, "__init__", flat)


def one_too_many_may_wait(patch: pytest.MonkeyPatch) -> None:
    make = TicketQueue.__init__

    def longer(queue, *, limit, aging_s):
        make(queue, limit=limit + 1, aging_s=aging_s)

    patch.setattr(TicketQueue, "__init__", longer)


def who_left_keeps_the_ticket(patch: pytest.MonkeyPatch) -> None:
    def keep(queue, sequence_id):
        return any(ticket.sequence_id == sequence_id for ticket in queue)

    patch.setattr(TicketQueue, "remove", keep)


def last_of_equals_goes_first(patch: pytest.MonkeyPatch) -> None:
    push = TicketQueue.push

    def count_down(queue, ticket):
        push(queue, ticket)
        queue._arrivals -= 2

    patch.setattr(TicketQueue, "push", count_down)


MACHINES: dict[type[RuleBasedStateMachine], tuple[Plant, ...]] = {
    PoolMachine: (
        generation_stays_when_a_block_is_freed,
        one_block_is_handed_out_twice,
        what_is_left_is_handed_out,
        fence_frees_its_blocks,
    ),
    LeaseMachine: (
        lease_never_expires,
        confirm_looks_at_no_generation,
        ended_epoch_may_come_again,
        end_is_reported_again,
    ),
    CoverageMachine: (
        block_may_land_twice,
        last_block_is_not_waited_for,
        every_group_begins_where_the_first_does,
        last_group_is_not_waited_for,
    ),
    ProtocolMachine: (
        confirm_waits_for_the_last_grant_only,
        any_generation_may_land,
    ),
    SchedulerMachine: (
        output_is_not_reserved,
        sequence_ends_twice,
        cancelled_transfer_is_not_fenced,
        step_in_flight_is_forgotten,
        youngest_prompt_goes_first,
    ),
    QueueMachine: (
        priority_counts_for_nothing,
        one_too_many_may_wait,
        who_left_keeps_the_ticket,
        last_of_equals_goes_first,
    ),
}


@pytest.mark.parametrize(
    ("machine", "plant"),
    [(machine, plant) for machine, plants in MACHINES.items() for plant in plants],
    ids=lambda value: value.__name__,
)
def test_machine_finds(machine, plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine, settings=FINDING)


@pytest.mark.parametrize(
    "plant",
    [block_may_land_twice, last_block_is_not_waited_for, block_may_be_short],
    ids=lambda plant: plant.__name__,
)
def test_coverage_property_finds(plant, monkeypatch):
    plant(monkeypatch)
    name = "test_coverage_is_full_exactly_when_each_expected_block_came_with_its_tokens"
    body = getattr(receiver_properties, name).hypothesis.inner_test
    with pytest.raises(FOUND):
        FINDING(given(**receiver_properties.COVERAGE_CASES)(body))()
