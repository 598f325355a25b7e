"""A request in flight: choices in parallel, one line of deltas, every call closed in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import pytest

from deployments.openai.answer import Delta, Usage
from deployments.openai.errors import GenerationFailedError
from deployments.pipeline import Run, SequencePlan
from deployments.text.sequence_text import TextOptions
from tests.fakes.backend import FakeBackend, Step, finished, frame, tokens_then_end
from tests.fakes.clock import FakeClock
from workers.engine.sampling_params import SamplingParams
from workers.messages import Failed, FailureCode, GenerateRequest

PROMPT = (1, 2, 3)
LETTERS = {10: "a", 11: "b", 12: "c"}


class RecordingObserver:
    """Implements `RunObserver`."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.ends: list[tuple[float | None, Usage]] = []

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def token_gap(self, seconds: float) -> None:
        self.gaps.append(seconds)

    def ended(self, seconds: float | None, usage: Usage) -> None:
        self.ends.append((seconds, usage))


def decode(token_ids) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids)


def plan(index: int, prompt_index: int = 0, stops: tuple[str, ...] = ()) -> SequencePlan:
    return SequencePlan(
        index=index,
        prompt_index=prompt_index,
        request=GenerateRequest(
            request_id=f"r-{index}",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=8, seed=index),
        ),
        text=TextOptions(decode=decode, token_bytes=lambda _: b"", stops=stops),
    )


def start(
    script: Callable[[GenerateRequest], Iterable[Step]],
    *plans: SequencePlan,
    timeout_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    backend: FakeBackend | None = None,
) -> tuple[Run, FakeBackend, RecordingObserver]:
    backend, observer = backend or FakeBackend(script), RecordingObserver()
    now = clock()
    run = Run(
        plans=plans or (plan(0),),
        backend=backend,
        observer=observer,
        clock=clock,
        arrived_at=now,
        deadline=now + timeout_s,
    )
    return run, backend, observer


async def received(run: Run) -> list[Delta]:
    deltas = []
    while not run.is_done:
        deltas += await run.receive()
    return deltas


def text_of(deltas: list[Delta], index: int) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def test_choices_run_at_once_and_keep_their_own_order():
    turn = asyncio.Event()

    def script(request: GenerateRequest) -> list[Step]:
        if request.request_id == "r-0":  # it can go on only if the other one runs beside it
            return [frame(10), turn, frame(11), finished(request, 2)]
        return [frame(12), frame(12), finished(request, 2)]

    run, backend, _ = start(script, plan(0), plan(1))
    async with run:
        deltas: list[Delta] = []
        while not any(delta.index == 1 and delta.ending for delta in deltas):
            deltas += await run.receive()
        assert not run.is_done
        turn.set()
        deltas += await received(run)
    assert (text_of(deltas, 0), text_of(deltas, 1)) == ("ab", "cc")
    assert backend.num_open == backend.num_cut == 0


async def test_usage_counts_a_prompt_once_and_all_output():
    def script(request: GenerateRequest) -> list[Step]:
        cached = 2 if request.request_id in ("r-0", "r-2") else 3
        return [frame(10, 11), finished(request, 2, cached_tokens=cached)]

    run, _, observer = start(script, plan(0), plan(1), plan(2, 1), plan(3, 1))
    async with run:
        assert run.usage == Usage(prompt_tokens=6, completion_tokens=0, cached_tokens=None)
        await received(run)
        usage = Usage(prompt_tokens=6, completion_tokens=8, cached_tokens=4)
        assert run.usage == usage
    ((seconds, seen),) = observer.ends
    assert seconds is not None
    assert seconds >= 0
    assert seen == usage


async def test_a_stop_string_ends_the_backend_call():
    forever = asyncio.Event()
    run, backend, _ = start(lambda _: [frame(10, 11, 12, 10), forever], plan(0, stops=("c",)))
    async with run:
        deltas = await received(run)
        assert text_of(deltas, 0) == "ab"
        assert run.usage.completion_tokens == 3
    assert (backend.num_open, backend.num_cut) == (0, 1)


async def test_leaving_early_closes_every_call():
    """Row 101: also while nothing comes."""
    forever = asyncio.Event()
    run, backend, observer = start(lambda _: [frame(10), forever], plan(0), plan(1))
    async with run:
        await run.receive()
    assert (backend.num_open, backend.num_cut) == (0, 2)
    assert observer.ends[0][0] is None


async def test_being_cancelled_closes_every_call():
    forever = asyncio.Event()
    run, backend, _ = start(lambda _: [forever], plan(0), plan(1))

    async def serve() -> None:
        async with run:
            await received(run)

    task = asyncio.create_task(serve())
    await backend.opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.idle.wait()
    assert backend.num_cut == 2


@pytest.mark.parametrize(
    ("step", "failure"),
    [
        (Failed(attempt=0, code=FailureCode.QUEUE_FULL, message="full"), FailureCode.QUEUE_FULL),
        (None, FailureCode.WORKER_LOST),
    ],
)
async def test_a_failure_comes_after_the_deltas_before_it(step, failure):
    def script(request: GenerateRequest) -> list[Step]:
        if request.request_id == "r-1":
            return [asyncio.Event()]
        return [frame(10), frame(11), *([step] if step else [])]

    run, backend, observer = start(script, plan(0), plan(1))
    deltas: list[Delta] = []

    async def serve() -> None:
        async with run:
            while not run.is_done:
                deltas.extend(await run.receive())

    with pytest.raises(GenerationFailedError) as caught:
        await serve()
    assert caught.value.failure is failure
    assert text_of(deltas, 0) == "ab"
    assert backend.num_open == 0
    assert observer.ends[0][0] is None


async def test_an_exception_of_the_backend_is_raised_as_it_is():
    run, _, _ = start(lambda _: [KeyError("broken")])
    with pytest.raises(KeyError):
        async with run:
            await received(run)


async def test_nothing_within_the_timeout_is_no_delta():
    go = asyncio.Event()
    run, _, _ = start(lambda request: [go, frame(10), finished(request, 1)])
    async with run:
        assert await run.receive(0.0) == []
        assert await run.receive(0.001) == []
        go.set()
        assert text_of(await received(run), 0) == "a"


async def test_the_deadline_ends_the_run():
    run, backend, _ = start(lambda _: [asyncio.Event()], timeout_s=0.02)
    with pytest.raises(GenerationFailedError) as caught:
        async with run:
            await run.receive()
    assert caught.value.failure is FailureCode.DEADLINE_EXCEEDED
    assert backend.num_open == 0
    left = backend.requests[0].timeout_s
    assert left is not None
    assert 0 < left <= 0.02


async def test_what_came_before_the_deadline_is_still_given_out():
    clock = FakeClock()
    run, backend, _ = start(tokens_then_end([10]), timeout_s=5.0, clock=clock)
    async with run:
        await backend.opened.wait()
        await backend.idle.wait()
        clock.advance(6.0)
        assert text_of(await received(run), 0) == "a"


async def test_times_are_measured_from_arrival_and_between_frames():
    clock = FakeClock(100.0)
    steps = [asyncio.Event(), asyncio.Event()]

    def script(request: GenerateRequest) -> list[Step]:
        return [steps[0], frame(10), frame(11), steps[1], frame(12), finished(request, 3)]

    run, _, observer = start(script, clock=clock)
    async with run:
        clock.advance(2.0)
        steps[0].set()
        deltas = await run.receive()
        while len(text_of(deltas, 0)) < 2:
            deltas += await run.receive()
        clock.advance(1.5)
        steps[1].set()
        await received(run)
    assert observer.first == [2.0]
    assert observer.gaps == [0.0, 1.5]
    assert observer.ends[0][0] == 3.5


async def test_a_reader_that_is_slow_holds_the_backend_up():
    """Deltas wait in a bounded mailbox; the backend is not read further meanwhile."""
    taken = 0

    def script(request: GenerateRequest) -> Iterable[Step]:
        nonlocal taken
        for _ in range(5000):
            taken += 1
            yield frame(10)
        yield finished(request, 5000)

    run, backend, _ = start(script)
    async with run:
        for _ in range(2000):  # turns of the loop, in which the relay could go on
            await asyncio.sleep(0)
        assert 0 < taken < 1000
        deltas = await received(run)
    assert len(text_of(deltas, 0)) == 5000
    assert backend.num_open == 0


class BrokenCloseBackend(FakeBackend):
    """Its calls fail, or hang, when they are closed."""

    def __init__(self, script, *, hangs: bool) -> None:
        super().__init__(script)
        self.hangs = hangs
        self.never = asyncio.Event()
        self.closing = asyncio.Event()
        self.broken_off = asyncio.Event()

    async def generate(self, request):
        try:
            async for event in super().generate(request):
                yield event
        finally:
            self.closing.set()
            try:
                if self.hangs:
                    await self.never.wait()
            finally:
                self.broken_off.set()
            raise ConnectionError("close failed")


async def test_an_answer_that_is_whole_survives_a_close_that_fails(caplog):
    backend = BrokenCloseBackend(tokens_then_end([10]), hangs=False)
    run, _, _ = start(backend.script, plan(0, stops=("a",)), plan(1), backend=backend)
    async with run:
        deltas = await received(run)
    assert (text_of(deltas, 0), text_of(deltas, 1)) == ("", "a")
    assert "close failed" in caplog.text


async def test_a_close_that_hangs_is_broken_off(monkeypatch, caplog):
    monkeypatch.setattr("deployments.pipeline._CLOSE_TIMEOUT_S", 0.01)
    backend = BrokenCloseBackend(tokens_then_end([10]), hangs=True)
    run, _, _ = start(backend.script, plan(0, stops=("a",)), backend=backend)
    async with run:
        await received(run)
    assert "does not close" in caplog.text
    await backend.broken_off.wait()


async def test_a_second_cancel_breaks_off_a_close_that_hangs():
    backend = BrokenCloseBackend(lambda _: [asyncio.Event()], hangs=True)
    run, _, observer = start(backend.script, backend=backend)

    async def serve() -> None:
        async with run:
            await received(run)

    task = asyncio.create_task(serve())
    await backend.opened.wait()
    task.cancel()
    await backend.closing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.broken_off.wait()
    assert len(observer.ends) == 1
