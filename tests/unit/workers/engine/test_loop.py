"""The engine: the scheduler on a real event loop and thread, with a fake model."""

import asyncio
import itertools
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.clock import FakeClock
from tests.fakes.model_runner import FakeModelRunner, generate
from tests.fakes.scheduling import BLOCK_SIZE, kinds, make_scheduler
from tests.fakes.until import until
from workers.engine.events import (
    TERMINAL_EVENTS,
    Admitted,
    Event,
    PromptComputed,
    SequenceFailed,
    SequenceFinished,
    TokensSampled,
)
from workers.engine.loop import MAX_STEP_S, Engine
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import SequenceMode, SequenceStatus
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    StepFailedError,
    WorkerStoppingError,
)

PROMPT = (5, 3, 8, 1, 9, 2)
TIMEOUT_S = 10
SLOW_S = 1e3
"""Of a prompt token: every wait is short beside it."""

Kind = TypeVar("Kind")


class Recorder:
    """A sink that keeps its events and can be awaited."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._grew = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._grew.set()

    async def until(self, *wanted: type[Kind]) -> Kind:
        """The first event of a wanted kind, once it is there."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for event in self.events:
                    if isinstance(event, wanted):
                        return event
                self._grew.clear()
                await self._grew.wait()

    async def end(self) -> Event:
        """The event that ended the sequence."""
        return await self.until(*TERMINAL_EVENTS)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return [
            token_id
            for event in self.events
            if isinstance(event, TokensSampled)
            for token_id in event.token_ids
        ]


class Cores:
    """Those of a host; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def claim(self) -> None:
        self.told.append("claim")

    def rest(self) -> None:
        self.told.append("rest")


class Rig:
    """An engine on a fake model, with what a test wants to turn."""

    def __init__(self, gather_s: float = 0.0) -> None:
        self.runner = FakeModelRunner(block_size=BLOCK_SIZE)
        self.clock = FakeClock()
        self.scheduler = make_scheduler()
        self.cores = Cores()
        self.engine = Engine(self.scheduler, self.runner, self.clock, self.cores, gather_s)

    def submit(
        self,
        sink: Callable[[Event], None],
        *,
        prompt: tuple[int, ...] = PROMPT,
        max_tokens: int = 4,
        mode: SequenceMode = SequenceMode.GENERATE,
        deadline: float | None = None,
    ) -> SequenceId:
        return self.engine.submit(
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            sink=sink,
            mode=mode,
            deadline=deadline,
        )

    def hold_steps(self) -> asyncio.Event:
        """Steps block on `runner.gate` from now on; the event tells that one has begun."""
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()
        self.runner.gate = threading.Event()
        self.runner.on_execute = lambda _plan: loop.call_soon_threadsafe(begun.set)
        return begun

    def learn(self, token_s: float) -> None:
        """Have the engine know, from a step, how long a prompt token takes."""
        row = ScheduledSequence(
            sequence_id=SequenceId(0), token_ids=(0,), start=0, block_tables=(), sampling=None
        )
        plan = StepPlan(step_id=0, sequences=(row,), num_streams=0)
        self.scheduler.pace.observe(plan, token_s)

    def let_go(self) -> None:
        assert self.runner.gate is not None
        self.runner.gate.set()


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """Gathers no prompts, or as long as a test says by its parameter."""
    made = Rig(getattr(request, "param", 0.0))
    made.engine.start()
    yield made
    if made.runner.gate is not None:
        made.runner.gate.set()
    await made.engine.stop()
    if made.engine.failure is None:
        made.scheduler.check_invariants()


async def in_time(event: asyncio.Event) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await event.wait()


# -- tokens -------------------------------------------------------------------------------------


async def test_sequence_gets_the_models_tokens_and_one_end(rig):
    sink = Recorder()
    rig.submit(sink)
    await sink.end()
    assert sink.token_ids == generate(PROMPT, 4)
    assert kinds(sink.events) == ["Admitted", *["TokensSampled"] * 4, "SequenceFinished"]


async def test_cores_are_claimed_while_there_is_something_to_compute(rig):
    rig.runner.on_execute = lambda _plan: rig.cores.told.append("step")
    for _ in range(2):
        sink = Recorder()
        rig.submit(sink, max_tokens=2)
        await sink.end()
        await until(lambda: rig.cores.told[-1] == "rest")
    told = " ".join(word for word, _ in itertools.groupby(rig.cores.told))
    assert re.fullmatch(r"(rest )?((claim step )+rest ?){2}", told)


async def test_sequences_together_get_the_tokens_that_each_gets_alone(rig):
    prompts = [tuple(range(number, number + 3 + number)) for number in range(8)]
    sinks = [Recorder() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        rig.submit(sink, prompt=prompt, max_tokens=9)
    for sink in sinks:
        await sink.end()
    assert [sink.token_ids for sink in sinks] == [generate(prompt, 9) for prompt in prompts]
    assert any(len(plan.sequences) > 1 for plan in rig.runner.plans)


@pytest.mark.parametrize(("rig", "first_step"), [(0.0, 1), (0.2, 2)], indirect=["rig"])
async def test_prompts_that_come_with_the_first_one_are_computed_with_it_if_it_waits(
    rig, first_step
):
    rig.learn(SLOW_S)
    rig.hold_steps()
    sinks = [Recorder(), Recorder()]
    for sink in sinks:  # each admitted before the next one comes
        rig.submit(sink)
        await sink.until(Admitted)
    rig.let_go()
    for sink in sinks:
        await sink.end()
    assert len(rig.runner.plans[0].sequences) == first_step


@pytest.mark.parametrize("rig", [3600.0], indirect=True)
@pytest.mark.parametrize("token_s", [None, 1e-6], ids=["nobody knows", "quick"])
async def test_a_prompt_waits_for_others_no_longer_than_it_is_worth(rig, token_s):
    if token_s is not None:
        rig.learn(token_s)
    sink = Recorder()
    rig.submit(sink)
    await sink.end()


@pytest.mark.parametrize("rig", [0.05], indirect=True)
async def test_prompts_that_never_cease_do_not_keep_the_first_one_waiting(rig):
    rig.learn(SLOW_S)
    sinks, at_first_step = [], []
    rig.runner.on_execute = lambda _plan: at_first_step.append(len(sinks))

    def another() -> None:
        """As long as nothing was computed, one more."""
        if not at_first_step and len(sinks) < 11:
            sinks.append(Recorder())
            rig.submit(sinks[-1], prompt=PROMPT[:2], max_tokens=1)
            asyncio.get_running_loop().call_later(0.01, another)

    another()
    await sinks[0].end()
    assert at_first_step[0] < 11, "a step is full with four"
    for sink in sinks:
        await sink.end()


@pytest.mark.parametrize("rig", [3600.0], indirect=True)
async def test_a_prompt_that_was_computed_elsewhere_is_not_waited_with(rig):
    rig.learn(SLOW_S)
    sink = Recorder()
    sequence_id = rig.submit(sink, mode=SequenceMode.AWAIT_KV, max_tokens=2)
    admitted = await sink.until(Admitted)
    rig.runner.write(admitted.block_tables[0].block_ids, PROMPT)  # the transfer
    rig.engine.publish(sequence_id, 7, first_tokens=())
    assert isinstance(await sink.end(), SequenceFinished)


async def test_sequence_handed_over_gets_the_same_tokens(rig):
    there, here = Recorder(), Recorder()
    held = rig.submit(there, mode=SequenceMode.PREFILL_ONLY)
    first = await there.until(PromptComputed)
    sequence_id = rig.submit(here, mode=SequenceMode.AWAIT_KV)
    admitted = await here.until(Admitted)
    rig.runner.write(admitted.block_tables[0].block_ids, PROMPT)  # the transfer
    assert rig.engine.publish(sequence_id, first.first_token, first_tokens=())
    rig.engine.release(held)
    await here.end()
    assert here.token_ids == generate(PROMPT, 4)
    assert kinds(there.events)[-2:] == ["PromptComputed", "SequenceReleased"]


async def test_fallback_computes_the_prompt_here(rig):
    sink = Recorder()
    sequence_id = rig.submit(sink, mode=SequenceMode.AWAIT_KV)
    await sink.until(Admitted)
    assert rig.engine.quarantine(sequence_id)
    assert rig.engine.fence(sequence_id)
    assert rig.engine.prefill_here(sequence_id)
    await sink.end()
    assert sink.token_ids == generate(PROMPT, 4)


# -- control while a step runs ------------------------------------------------------------------


async def test_first_event_comes_after_submit_has_returned(rig):
    events: list[Event] = []
    rig.submit(events.append)
    assert events == []


async def test_admission_is_told_while_a_step_is_in_flight(rig):
    """A transfer must not wait for somebody else's forward pass."""
    begun = rig.hold_steps()
    rig.submit(Recorder())
    await in_time(begun)
    late = Recorder()
    rig.submit(late, mode=SequenceMode.AWAIT_KV)
    await late.until(Admitted)
    assert len(rig.runner.plans) == 1


async def test_cancel_in_flight_ends_at_once_and_frees_after_the_step(rig):
    begun = rig.hold_steps()
    sink = Recorder()
    sequence_id = rig.submit(sink)
    await in_time(begun)
    assert rig.engine.cancel(sequence_id)
    await sink.end()
    assert rig.engine.stats().free_blocks == 13
    marker = Recorder()
    rig.submit(marker, max_tokens=1)
    rig.let_go()
    await marker.end()
    assert rig.engine.stats().free_blocks == 16
    assert kinds(sink.events) == ["Admitted", "SequenceAborted"]


async def test_cancel_of_an_ended_sequence_is_answered_with_false(rig):
    sink = Recorder()
    sequence_id = rig.submit(sink)
    await sink.end()
    assert not rig.engine.cancel(sequence_id)


async def test_deadline_wakes_an_idle_engine(rig):
    rig.clock.advance(100)
    sink = Recorder()
    rig.submit(sink, mode=SequenceMode.AWAIT_KV, deadline=100.02)
    await sink.until(Admitted)
    rig.clock.advance(1)
    end = await sink.end()
    assert isinstance(end, SequenceFailed)
    assert isinstance(end.error, DeadlineExceededError)


async def test_refused_sequence_leaves_nothing_behind(rig):
    with pytest.raises(ContextOverflowError):
        rig.submit(Recorder(), max_tokens=100)
    assert rig.engine.stats().by_status == {}


async def test_generation_of_a_block_grows_when_it_is_freed(rig):
    sink = Recorder()
    rig.submit(sink)
    await sink.end()
    assert [rig.engine.generation_of(BlockId(index)) for index in (0, 15)] == [1, 0]


async def test_stats_count_blocks_sequences_and_work(rig):
    done, waiting = Recorder(), Recorder()
    rig.submit(done)
    await done.end()
    rig.submit(waiting, mode=SequenceMode.AWAIT_KV)
    stats = rig.engine.stats()
    assert (stats.total_blocks, stats.free_blocks, stats.reserved_blocks) == (16, 13, 3)
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (6, 4, 1)
    assert stats.by_status == {SequenceStatus.AWAITING_KV: 1}
    assert stats.steps == len(rig.runner.plans)


async def test_step_seconds_add_up(rig):
    rig.runner.on_execute = lambda _plan: rig.clock.advance(2)
    sink = Recorder()
    rig.submit(sink, prompt=(1,), max_tokens=3)
    await sink.end()
    assert rig.engine.stats().step_seconds == 6


# -- failures -----------------------------------------------------------------------------------


async def test_failed_step_fails_its_sequences_and_the_engine_goes_on(rig, caplog):
    rig.runner.errors.append(RuntimeError("secret prompt"))
    hit, later = Recorder(), Recorder()
    rig.submit(hit)
    end = await hit.end()
    assert isinstance(end, SequenceFailed)
    assert isinstance(end.error, StepFailedError)
    assert "secret" not in str(end.error)
    rig.submit(later)
    await later.end()
    assert later.token_ids == generate(PROMPT, 4)
    assert rig.engine.healthy
    assert rig.engine.stats().failed_steps == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_failures_with_a_good_step_between_leave_the_engine_healthy(rig):
    for _ in range(3):
        rig.runner.errors.append(RuntimeError("now and then"))
        hit, good = Recorder(), Recorder()
        rig.submit(hit)
        await hit.end()
        rig.submit(good)
        await good.end()
    assert rig.engine.healthy


async def test_second_failure_in_a_row_ends_the_engine_and_every_sequence(rig):
    error = RuntimeError("broken for good")
    rig.runner.errors.extend([RuntimeError("first"), error])
    first, second, bystander = Recorder(), Recorder(), Recorder()
    rig.submit(first)
    await first.end()
    waiting_id = rig.submit(bystander, mode=SequenceMode.AWAIT_KV)
    rig.submit(second)
    await second.end()
    end = await bystander.end()
    assert isinstance(end, SequenceFailed)
    assert isinstance(end.error, WorkerStoppingError)
    assert rig.engine.failure is error
    assert rig.cores.told[-1] == "rest"
    assert not rig.engine.healthy
    assert not rig.engine.publish(waiting_id, 1, first_tokens=())
    with pytest.raises(WorkerStoppingError):
        rig.submit(Recorder())


async def test_step_without_the_tokens_it_owes_is_a_failed_step(rig):
    """The runner's answer is checked before anything changes."""
    execute = rig.runner.execute

    def forget_tokens(plan: StepPlan):
        result = execute(plan)
        result.token_ids.clear()
        return result

    rig.runner.execute = forget_tokens
    sink = Recorder()
    rig.submit(sink)
    end = await sink.end()
    assert isinstance(end, SequenceFailed)
    assert isinstance(end.error, StepFailedError)


async def test_sequence_with_bad_logits_fails_alone(rig):
    begun = rig.hold_steps()
    bad, good = Recorder(), Recorder()
    rig.runner.failed[rig.submit(bad)] = "logits are not finite"
    rig.submit(good)
    await in_time(begun)
    rig.let_go()
    end = await bad.end()
    assert isinstance(end, SequenceFailed)
    assert str(end.error) == "logits are not finite"
    assert isinstance(await good.end(), SequenceFinished)


async def test_sink_that_raises_harms_nobody_else(rig, caplog):
    def broken(event: Event) -> None:
        raise KeyError(type(event).__name__)

    good = Recorder()
    rig.submit(broken)
    rig.submit(good)
    await good.end()
    assert good.token_ids == generate(PROMPT, 4)
    assert rig.engine.healthy
    assert "sink raised sequence_id=0" in caplog.text


async def test_bug_in_the_scheduler_still_ends_every_sequence(rig):
    begun = rig.hold_steps()
    sinks = [Recorder(), Recorder()]
    rig.submit(sinks[0])
    rig.submit(sinks[1], mode=SequenceMode.AWAIT_KV)
    await in_time(begun)
    rig.scheduler._roster.decoding = None  # what follows cannot work
    rig.let_go()
    for sink in sinks:
        end = await sink.end()
        assert isinstance(end, SequenceFailed)
        assert isinstance(end.error, WorkerStoppingError)
    assert not rig.engine.healthy


async def test_idle_engine_checks_itself(rig):
    sink = Recorder()
    rig.submit(sink, mode=SequenceMode.AWAIT_KV)
    await sink.until(Admitted)
    rig.scheduler.pool._counts[0] += 1
    rig.clock.advance(60)
    rig.submit(Recorder(), mode=SequenceMode.AWAIT_KV)
    end = await sink.end()
    assert isinstance(end, SequenceFailed)
    assert "INV-CONSERVE" in str(rig.engine.failure)


async def test_step_that_hangs_makes_the_engine_unhealthy_until_it_ends(rig):
    begun = rig.hold_steps()
    sink = Recorder()
    rig.submit(sink)
    await in_time(begun)
    rig.clock.advance(MAX_STEP_S)
    assert rig.engine.healthy
    rig.clock.advance(0.1)
    assert not rig.engine.healthy
    with pytest.raises(WorkerStoppingError):
        rig.submit(Recorder())
    rig.let_go()
    await sink.end()
    assert rig.engine.healthy


# -- start and stop -----------------------------------------------------------------------------


async def test_engine_that_was_not_started_takes_nothing():
    rig = Rig()
    assert not rig.engine.healthy
    with pytest.raises(WorkerStoppingError):
        rig.submit(Recorder())
    await rig.engine.stop()


async def test_stop_ends_what_is_left_and_waits_for_the_step_in_flight(rig):
    begun = rig.hold_steps()
    sinks = [Recorder(), Recorder()]
    rig.submit(sinks[0])
    rig.submit(sinks[1], mode=SequenceMode.AWAIT_KV)
    await in_time(begun)
    stopping = asyncio.create_task(rig.engine.stop())
    for sink in sinks:
        end = await sink.end()
        assert isinstance(end, SequenceFailed)
        assert isinstance(end.error, WorkerStoppingError)
    assert not stopping.done()
    rig.let_go()
    await stopping
    stats = rig.engine.stats()
    assert (stats.used_blocks, stats.reserved_blocks, stats.quarantined_blocks) == (0, 0, 3)


async def test_fence_after_stop_frees_the_blocks(rig):
    sink = Recorder()
    sequence_id = rig.submit(sink, mode=SequenceMode.AWAIT_KV)
    await rig.engine.stop()
    rig.engine.fence(sequence_id)
    assert rig.engine.stats().free_blocks == 16


async def test_stop_does_not_wait_for_a_step_that_hangs(rig, caplog):
    begun = rig.hold_steps()
    sink = Recorder()
    rig.submit(sink)
    await in_time(begun)
    await rig.engine.stop(timeout_s=0.01)
    assert isinstance(await sink.end(), SequenceFailed)
    assert "did not end in time" in caplog.text


async def test_stop_is_safe_to_repeat(rig):
    sink = Recorder()
    rig.submit(sink)
    await rig.engine.stop()
    await rig.engine.stop()
    assert kinds(sink.events)[-1] == "SequenceFailed"
    assert len([event for event in sink.events if isinstance(event, TERMINAL_EVENTS)]) == 1


async def test_submit_while_stopping_is_refused(rig):
    await rig.engine.stop()
    with pytest.raises(WorkerStoppingError):
        rig.submit(Recorder())


async def test_engine_whose_task_is_cancelled_ends_every_sequence(rig):
    sink = Recorder()
    rig.submit(sink, mode=SequenceMode.AWAIT_KV)
    await sink.until(Admitted)
    rig.engine._task.cancel()
    assert isinstance(await sink.end(), SequenceFailed)
    assert not rig.engine.healthy
