"""Who is admitted, who waits, who is refused."""

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.scheduling import (
    free_blocks,
    kinds,
    make_scheduler,
    make_spec,
    step,
)
from workers.engine.block_table import BlockTable
from workers.engine.events import (
    Admitted,
)
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceStatus
from workers.engine.step import SequenceId
from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    QueueFullError,
)

ZERO = SequenceId(0)
ONE = SequenceId(1)
TWO = SequenceId(2)
PREFILL_ONLY = SequenceMode.PREFILL_ONLY


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_sequences", 0, "at least 1"),
        ("prefill_chunk_tokens", 0, "at least 1"),
        ("max_model_len", 0, "at least 1"),
        ("step_tokens", 3, "step_tokens 3 must be at least max_sequences 4"),
        ("queue_limit", -1, "negative"),
        ("aging_s", -1.0, "negative"),
    ],
)
def test_config_refuses_limits_that_cannot_work(field, value, message):
    limits = {
        "max_model_len": 32,
        "max_sequences": 4,
        "step_tokens": 8,
        "prefill_chunk_tokens": 4,
        "queue_limit": 8,
        field: value,
    }
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**limits)


def test_admission_reserves_prompt_and_output():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=5, max_tokens=8), 0.0)
    assert scheduler.pool.counts().reserved == 4  # 13 tokens in blocks of 4


def test_admission_of_prefill_only_reserves_the_prompt():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=5, max_tokens=8, mode=PREFILL_ONLY), 0.0)
    assert scheduler.pool.counts().reserved == 2


def test_request_beyond_the_window_is_refused_with_all_three_numbers():
    scheduler = make_scheduler(max_model_len=32)
    with pytest.raises(ContextOverflowError, match=r"window is 32 .* prompt has 20 .* is 13"):
        scheduler.submit(make_spec(prompt=20, max_tokens=13), 0.0)
    assert scheduler.num_live == 0
    assert free_blocks(scheduler) == 16


def test_request_of_exactly_the_window_is_admitted():
    scheduler = make_scheduler(max_model_len=32)
    scheduler.submit(make_spec(prompt=20, max_tokens=12), 0.0)
    assert scheduler.status_of(ZERO) is SequenceStatus.PREFILLING


def test_prefill_only_request_beyond_the_window_is_refused_too():
    with pytest.raises(ContextOverflowError):
        make_scheduler().submit(make_spec(prompt=20, max_tokens=13, mode=PREFILL_ONLY), 0.0)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 4), (4, 0)])
def test_request_without_prompt_or_output_is_a_mistake(prompt, max_tokens):
    with pytest.raises(ValueError, match="needs a prompt and output"):
        make_scheduler().submit(make_spec(prompt=prompt, max_tokens=max_tokens), 0.0)


def test_id_of_a_live_sequence_is_not_taken_again():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(0), 0.0)
    with pytest.raises(ValueError, match="sequence 0 exists already"):
        scheduler.submit(make_spec(0), 0.0)


def test_request_after_its_deadline_is_refused():
    with pytest.raises(DeadlineExceededError):
        make_scheduler().submit(make_spec(deadline=5.0), 5.0)


def test_request_without_room_waits_and_holds_nothing():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=8), 0.0)
    scheduler.submit(make_spec(1, prompt=8, max_tokens=4), 0.0)
    assert scheduler.status_of(ONE) is SequenceStatus.WAITING
    assert scheduler.num_waiting == 1
    assert free_blocks(scheduler) == 2


def test_small_request_does_not_overtake_the_head_for_memory():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=8), 0.0)
    scheduler.submit(make_spec(1, prompt=8, max_tokens=4), 0.0)
    scheduler.submit(make_spec(2, prompt=1, max_tokens=1), 0.0)
    assert scheduler.status_of(TWO) is SequenceStatus.WAITING


def test_urgent_request_that_becomes_the_head_is_admitted_if_it_fits():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=8), 0.0)
    scheduler.submit(make_spec(1, prompt=8, max_tokens=4), 0.0)
    scheduler.submit(make_spec(2, prompt=1, max_tokens=1, priority=-1), 0.0)
    assert scheduler.status_of(TWO) is SequenceStatus.PREFILLING


def test_full_queue_refuses_and_keeps_nothing():
    scheduler = make_scheduler(num_blocks=8, queue_limit=0)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=8), 0.0)
    with pytest.raises(QueueFullError):
        scheduler.submit(make_spec(1, prompt=16, max_tokens=8), 0.0)
    assert scheduler.num_live == 1


def test_queue_of_none_still_admits_what_fits():
    scheduler = make_scheduler(queue_limit=0)
    scheduler.submit(make_spec(0), 0.0)
    assert kinds(scheduler.take_events()) == ["Admitted"]


def test_head_is_admitted_when_blocks_come_back():
    scheduler = make_scheduler(num_blocks=8)
    scheduler.submit(make_spec(0, prompt=16, max_tokens=16), 0.0)
    scheduler.submit(make_spec(1, prompt=8, max_tokens=4), 0.0)
    scheduler.cancel(ZERO)
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING


def test_no_more_than_max_sequences_are_admitted():
    scheduler = make_scheduler(max_sequences=2)
    for number in range(3):
        scheduler.submit(make_spec(number), 0.0)
    assert scheduler.count_by_status() == {
        SequenceStatus.PREFILLING: 2,
        SequenceStatus.WAITING: 1,
    }


def test_held_sequences_leave_room_for_others():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.submit(make_spec(0, mode=PREFILL_ONLY), 0.0)
    scheduler.submit(make_spec(1, mode=PREFILL_ONLY), 0.0)
    step(scheduler)
    assert scheduler.status_of(ZERO) is SequenceStatus.HELD
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING


def test_admitted_names_the_block_table():
    scheduler = make_scheduler()
    scheduler.submit(make_spec(prompt=5, max_tokens=3), 0.0)
    table = BlockTable(block_ids=(BlockId(0), BlockId(1)))
    expected = Admitted(sequence_id=ZERO, block_tables=(table,))
    assert scheduler.take_events() == [expected]
