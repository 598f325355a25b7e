"""Groups of layers with a sliding window: what is held, what is given up, and when."""

import pytest

from kv_transfer.geometry import KVGroup, ceil_div
from tests.fakes.model_runner import FakeModelRunner, generate
from tests.fakes.scheduling import (
    BLOCK_SIZE,
    SCOPE,
    free_blocks,
    make_scheduler,
    make_spec,
    must_plan,
    result_of,
    run_dry,
    step,
)
from workers.engine.block_pool import BlockPool
from workers.engine.events import PromptComputed, TokensSampled
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import SequenceMode, SequenceStatus
from workers.engine.step import SequenceId
from workers.errors import PoolTooSmallError

ZERO = SequenceId(0)
ONE = SequenceId(1)
AWAIT_KV = SequenceMode.AWAIT_KV
PREFILL_ONLY = SequenceMode.PREFILL_ONLY
WINDOW = 6
CHUNK = 4
MOST_IN_CHUNKS = 3
"""Blocks of 4: five tokens before a chunk of four, which may begin anywhere in a block."""
MOST_DECODING = 3
"""Six tokens, anywhere."""


def windowed(**changes: object) -> Scheduler:
    """All layers have a window; sequences may be far longer than the pool."""
    sizes = {"num_blocks": 7, "max_model_len": 200, "windows": (WINDOW,)} | changes
    return make_scheduler(prefill_chunk_tokens=CHUNK, **sizes)  # type: ignore[arg-type]


def held(scheduler: Scheduler, sequence_id: SequenceId = ZERO) -> int:
    return len(scheduler._roster.live[sequence_id].block_ids)


def test_long_sequence_never_holds_more_than_its_window_and_a_chunk():
    scheduler = windowed(num_blocks=MOST_IN_CHUNKS)
    scheduler.submit(make_spec(prompt=90, max_tokens=60), 0.0)
    runner = FakeModelRunner(block_size=BLOCK_SIZE, windows=(WINDOW,))
    while (plan := scheduler.plan(0.0)) is not None:
        assert held(scheduler) <= MOST_IN_CHUNKS
        scheduler.check_invariants()
        scheduler.commit(runner.execute(plan))
    sampled = [e for e in scheduler.take_events() if isinstance(e, TokensSampled)]
    tokens = [token for event in sampled for token in event.token_ids]
    assert tokens == generate(range(90), 60, (WINDOW,))
    assert scheduler.pool.counts().free == MOST_IN_CHUNKS


def test_sequences_that_would_fill_the_pool_many_times_run_at_once():
    scheduler = windowed(num_blocks=2 * MOST_IN_CHUNKS)
    for number in (0, 1):
        scheduler.submit(make_spec(number, prompt=90, max_tokens=100), 0.0)
    assert len(must_plan(scheduler).sequences) == 2


def test_full_group_beside_a_window_keeps_everything():
    scheduler = windowed(num_blocks=53, windows=(None, WINDOW))
    scheduler.submit(make_spec(prompt=30, max_tokens=10), 0.0)
    assert held(scheduler) == 10 + MOST_IN_CHUNKS
    for _ in range(9):
        plan = step(scheduler)
    full, sliding = plan.sequences[0].block_tables
    assert (full.start, full.end) == (0, 10)
    assert (sliding.start, sliding.end) == ((30 - WINDOW + 1) // BLOCK_SIZE, 9)


def test_blocks_behind_the_window_are_given_up_when_the_next_step_is_planned():
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=12, max_tokens=8), 0.0)
    for start, first_block in ((0, 0), (4, 0), (8, 0), (12, 1)):
        (entry,) = must_plan(scheduler).sequences
        assert (entry.start, entry.block_tables[0].start) == (start, first_block)
        scheduler.commit(result_of(scheduler._in_flight))


def test_block_that_was_given_up_is_of_another_generation():
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=20, max_tokens=4), 0.0)
    (first, *_) = must_plan(scheduler).sequences[0].block_tables[0].block_ids
    scheduler.commit(result_of(scheduler._in_flight))
    run_dry(scheduler)
    assert scheduler.pool.generations[first] > 0


def test_room_for_chunks_is_given_up_when_the_prompt_is_computed():
    scheduler = make_scheduler(
        num_blocks=6, max_model_len=200, windows=(WINDOW,), prefill_chunk_tokens=8
    )
    scheduler.submit(make_spec(prompt=16, max_tokens=40), 0.0)
    assert held(scheduler) == 4
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert held(scheduler) == MOST_DECODING


def test_waiting_sequence_gets_what_another_gives_up():
    scheduler = make_scheduler(
        num_blocks=7, max_model_len=200, windows=(WINDOW,), prefill_chunk_tokens=8
    )
    scheduler.submit(make_spec(0, prompt=8, max_tokens=40), 0.0)
    scheduler.submit(make_spec(1, prompt=8, max_tokens=40), 0.0)
    assert scheduler.status_of(ONE) is SequenceStatus.WAITING
    step(scheduler)
    step(scheduler)
    assert scheduler.status_of(ONE) is SequenceStatus.PREFILLING


def test_pool_below_one_window_over_all_groups_is_refused():
    needed = 8 + MOST_IN_CHUNKS
    sizes = {"max_model_len": 32, "windows": (None, WINDOW), "prefill_chunk_tokens": CHUNK}
    make_scheduler(num_blocks=needed, **sizes)  # type: ignore[arg-type]
    with pytest.raises(PoolTooSmallError, match=r"INV-POOL-WINDOW: .* 32 tokens and needs 11"):
        make_scheduler(num_blocks=needed - 1, **sizes)  # type: ignore[arg-type]


def test_pool_that_was_made_for_other_windows_is_refused():
    pool = BlockPool(num_blocks=8, block_size=BLOCK_SIZE, max_model_len=32)
    with pytest.raises(ValueError, match=r"sliding windows are \(6,\), the pool's \(None,\)"):
        Scheduler(pool, windowed().config, SCOPE, groups=(KVGroup(layers=(0,), sliding_window=6),))


# -- hand-off -----------------------------------------------------------------------------------


def test_held_prompt_keeps_what_comes_after_it_will_see():
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=30, mode=PREFILL_ONLY), 0.0)
    run_dry(scheduler)
    events = scheduler.take_events()
    assert isinstance(events[-1], PromptComputed)
    (table,) = events[-2].block_tables
    first_seen = (30 - WINDOW + 1) // BLOCK_SIZE
    assert table.start <= first_seen
    assert table.end == ceil_div(30, BLOCK_SIZE)
    scheduler.check_invariants()


def test_awaited_prompt_is_placed_where_its_output_will_see_it():
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=30, max_tokens=9, mode=AWAIT_KV), 0.0)
    (admitted,) = scheduler.take_events()
    (table,) = admitted.block_tables
    assert table.start == (30 - WINDOW + 1) // BLOCK_SIZE
    assert len(table.block_ids) == MOST_IN_CHUNKS
    scheduler.publish(ZERO, 100)
    (entry,) = must_plan(scheduler).sequences
    assert entry.block_tables[0].cut(6, 8) == table.cut(6, 8)
    scheduler.check_invariants()


def test_prompt_that_was_awaited_is_computed_here_from_its_start():
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=30, max_tokens=9, mode=AWAIT_KV), 0.0)
    scheduler.quarantine(ZERO)
    scheduler.fence(ZERO)
    scheduler.prefill_here(ZERO)
    (entry,) = must_plan(scheduler).sequences
    assert (entry.start, entry.block_tables[0].start) == (0, 0)
    scheduler.commit(result_of(scheduler._in_flight))
    run_dry(scheduler)
    assert free_blocks(scheduler) == 7


# -- what the self-check sees -------------------------------------------------------------------


def running() -> Scheduler:
    scheduler = windowed()
    scheduler.submit(make_spec(prompt=20, max_tokens=20), 0.0)
    for _ in range(7):
        step(scheduler)
    return scheduler


def tamper_gave_up_too_much(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVGroup, "first_block", lambda *_: 0)


def tamper_holds_too_much(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVGroup, "max_blocks", lambda *_, **__: 1)


def tamper_lost_its_end(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    scheduler._roster.live[ZERO].num_computed += 8


@pytest.mark.parametrize(
    "tamper", [tamper_gave_up_too_much, tamper_holds_too_much, tamper_lost_its_end]
)
def test_check_invariants_sees_a_table_that_is_not_what_was_promised(tamper, monkeypatch):
    scheduler = running()
    scheduler.check_invariants()
    tamper(scheduler, monkeypatch)
    with pytest.raises(AssertionError, match="INV-ADMIT"):
        scheduler.check_invariants()
