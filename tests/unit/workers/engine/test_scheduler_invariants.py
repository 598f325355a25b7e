"""The self-check sees a scheduler that contradicts itself."""

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.scheduling import (
    make_scheduler,
    make_spec,
    step,
)
from workers.engine.block_pool import BlockState
from workers.engine.block_table import BlockTable
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import SequenceMode
from workers.engine.step import SequenceId

ZERO = SequenceId(0)
ONE = SequenceId(1)
TWO = SequenceId(2)
AWAIT_KV = SequenceMode.AWAIT_KV


def busy_scheduler() -> Scheduler:
    """A decoding, an awaiting, an unfenced and a waiting sequence."""
    scheduler = make_scheduler(max_sequences=2)
    scheduler.submit(make_spec(0, mode=AWAIT_KV), 0.0)
    scheduler.cancel(ZERO)
    scheduler.submit(make_spec(1), 0.0)
    step(scheduler)
    scheduler.submit(make_spec(2, mode=AWAIT_KV), 0.0)
    scheduler.submit(make_spec(3), 0.0)
    return scheduler


def tamper_lost_block(scheduler: Scheduler) -> None:
    scheduler._roster.live[TWO].block_tables = ()


def tamper_shared_block(scheduler: Scheduler) -> None:
    live = scheduler._roster.live
    live[TWO].block_tables = live[ONE].block_tables


def tamper_quarantine(scheduler: Scheduler) -> None:
    scheduler.pool.unquarantine((BlockId(0),))


def tamper_state(scheduler: Scheduler) -> None:
    scheduler.pool.mark_used(scheduler._roster.live[TWO].block_ids)


def tamper_reservation(scheduler: Scheduler) -> None:
    sequence = scheduler._roster.live[TWO]
    scheduler.pool.release(sequence.block_ids[1:])
    sequence.block_tables = (BlockTable(block_ids=sequence.block_ids[:1]),)


def tamper_waiting(scheduler: Scheduler) -> None:
    block_ids = scheduler.pool.reserve(1)
    assert block_ids is not None
    scheduler._roster.live[SequenceId(3)].block_tables = (BlockTable(block_ids=block_ids),)


def tamper_count(scheduler: Scheduler) -> None:
    scheduler._roster._num_active = 1


def tamper_head(scheduler: Scheduler) -> None:
    scheduler._roster._max_sequences = 3


def tamper_collection(scheduler: Scheduler) -> None:
    scheduler._roster.decoding.clear()


@pytest.mark.parametrize(
    ("tamper", "invariant"),
    [
        (tamper_lost_block, "INV-CONSERVE"),
        (tamper_shared_block, "INV-CONSERVE"),
        (tamper_quarantine, "INV-FENCE"),
        (tamper_state, "INV-CONSERVE"),
        (tamper_reservation, "INV-ADMIT"),
        (tamper_waiting, "INV-ADMIT"),
        (tamper_count, "INV-ADMIT"),
        (tamper_head, "INV-ADMIT"),
        (tamper_collection, "INV-ONE-END"),
    ],
)
def test_check_invariants_sees_a_scheduler_that_contradicts_itself(tamper, invariant):
    scheduler = busy_scheduler()
    scheduler.check_invariants()
    tamper(scheduler)
    with pytest.raises(AssertionError, match=invariant):
        scheduler.check_invariants()


def test_pool_states_tell_what_a_block_is_for():
    scheduler = busy_scheduler()
    states = dict.fromkeys(BlockState, 0)
    for block_id in range(scheduler.pool.num_blocks):
        states[scheduler.pool.state(BlockId(block_id))] += 1
    assert states == {
        BlockState.FREE: 10,
        BlockState.RESERVED: 3,
        BlockState.USED: 1,
        BlockState.QUARANTINED: 2,
        BlockState.CACHED: 0,
    }
