"""A request that loses its decode worker goes on with another one; its reader sees a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace

import pytest

from deployments.resume import Loss, ResumeConfig, ResumingBackend
from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.backend import Step
from tests.fakes.clock import FakeClock
from tests.fakes.until import until
from workers.engine.sampling_params import SamplingParams
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Heartbeat,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
)

REQUEST = GenerateRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=6, seed=4)
)
PATIENT = ResumeConfig(silence_s=30.0, answer_s=30.0, pause_s=0.0)


class FakePool:
    """Implements `WorkerPool`; the n-th attempt gets what the n-th script says."""

    def __init__(self, *scripts: Callable[[GenerateRequest], Iterable[Step]]) -> None:
        self._scripts = list(scripts)
        self.attempts: list[GenerateRequest] = []
        self.num_open = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """See `WorkerPool.generate`."""
        script = self._scripts[len(self.attempts)]
        self.attempts.append(request)
        self.num_open += 1
        try:
            for step in script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.num_open -= 1

    async def is_ready(self) -> bool:
        """See `WorkerPool.is_ready`."""
        return bool(self._scripts)


def frame(request: GenerateRequest, *token_ids: int) -> TokenFrame:
    return TokenFrame(attempt=request.attempt, token_ids=token_ids)


def beat(request: GenerateRequest, worker: str = "replica-a") -> Heartbeat:
    return Heartbeat(attempt=request.attempt, worker=worker)


def failed(request: GenerateRequest, code: FailureCode = FailureCode.WORKER_LOST) -> Failed:
    return Failed(attempt=request.attempt, code=code, message="as the worker said")


def finished(request: GenerateRequest, completion_tokens: int) -> Finished:
    return Finished(
        attempt=request.attempt,
        reason=FinishReason.STOP,
        prompt_tokens=3,
        completion_tokens=completion_tokens,
    )


async def run(
    pool: FakePool,
    config: ResumeConfig = PATIENT,
    request: GenerateRequest = REQUEST,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[list[GenerateEvent], list[Loss]]:
    losses: list[Loss] = []
    backend = ResumingBackend(pool, config, clock=clock, on_loss=losses.append)
    events = [event async for event in backend.generate(request)]
    assert pool.num_open == 0
    return events, losses


def tokens_of(events: Iterable[GenerateEvent]) -> list[int]:
    return [
        token_id
        for event in events
        if isinstance(event, TokenFrame)
        for token_id in event.token_ids
    ]


async def test_a_request_that_loses_nobody_is_passed_on_as_it_is():
    pool = FakePool(lambda r: [beat(r), frame(r, 7), frame(r, 8), finished(r, 2)])
    events, losses = await run(pool)
    assert events == [frame(REQUEST, 7), frame(REQUEST, 8), finished(REQUEST, 2)]
    assert losses == []
    assert pool.attempts == [REQUEST]


async def test_a_lost_worker_s_tokens_are_what_the_next_one_goes_on_from():
    pool = FakePool(
        lambda r: [beat(r), frame(r, 7, 8), failed(r)],
        lambda r: [frame(r, 9), finished(r, 3)],
    )
    events, losses = await run(pool)
    assert tokens_of(events) == [7, 8, 9]
    assert isinstance(events[-1], Finished)
    assert losses == [Loss.LOST]
    second = pool.attempts[1]
    assert (second.attempt, second.resumed_token_ids, second.avoid) == (1, (7, 8), ("replica-a",))
    assert second.sampling == REQUEST.sampling


async def test_a_worker_that_stops_or_just_ends_its_stream_is_lost_too():
    pool = FakePool(
        lambda r: [failed(r, FailureCode.WORKER_STOPPING)],
        lambda r: [frame(r, 7)],
        lambda r: [finished(r, 1)],
    )
    events, losses = await run(pool)
    assert tokens_of(events) == [7]
    assert losses == [Loss.STOPPING, Loss.LOST]


async def test_a_worker_without_a_sign_of_life_is_fenced():
    """What it sends when it wakes is read by nobody."""
    forever = asyncio.Event()
    pool = FakePool(
        lambda r: [frame(r, 7), beat(r), forever, frame(r, 99)],
        lambda r: [frame(r, 8), finished(r, 2)],
    )
    config = ResumeConfig(silence_s=0.02, answer_s=30.0, pause_s=0.0)
    events, losses = await run(pool, config)
    assert tokens_of(events) == [7, 8]
    assert losses == [Loss.SILENT]


async def test_heartbeats_keep_a_quiet_worker():
    turns = [asyncio.Event() for _ in range(4)]
    pool = FakePool(
        lambda r: [step for turn in turns for step in (beat(r), turn)] + [finished(r, 0)]
    )
    config = ResumeConfig(silence_s=0.4, answer_s=30.0, pause_s=0.0)
    loop = asyncio.get_running_loop()
    for number, turn in enumerate(turns):
        loop.call_later(0.15 * (number + 1), turn.set)  # together longer than one silence
    events, losses = await run(pool, config)
    assert isinstance(events[-1], Finished)
    assert losses == []


async def test_being_answered_by_nobody_costs_no_attempt():
    """A pool that restarts takes longer than any number of attempts."""
    forever = asyncio.Event()
    config = ResumeConfig(silence_s=30.0, answer_s=0.01, pause_s=0.0, max_losses=1)
    nobody = [lambda _: [forever]] * 3
    pool = FakePool(*nobody, lambda r: [frame(r, 7), finished(r, 1)])
    events, losses = await run(pool, config)
    assert tokens_of(events) == [7]
    assert losses == [Loss.UNANSWERED] * 3


async def test_a_request_that_takes_its_workers_down_ends_before_it_has_had_them_all():
    pool = FakePool(*[lambda r: [beat(r), failed(r)]] * 9)
    config = ResumeConfig(silence_s=30.0, answer_s=30.0, pause_s=0.0, max_losses=3)
    events, losses = await run(pool, config)
    assert len(pool.attempts) == len(losses) == 3
    (last,) = events
    assert isinstance(last, Failed)
    assert last.code is FailureCode.WORKER_LOST
    assert last.message == "as the worker said"


@pytest.mark.parametrize(
    "code",
    [
        FailureCode.QUEUE_FULL,
        FailureCode.DEADLINE_EXCEEDED,
        FailureCode.CONTEXT_LENGTH_EXCEEDED,
        FailureCode.INTERNAL,
    ],
)
async def test_a_failure_of_the_request_itself_is_final(code):
    pool = FakePool(lambda r: [failed(r, code)])
    events, losses = await run(pool)
    assert events == [failed(REQUEST, code)]
    assert losses == []


async def test_a_worker_lost_after_the_last_token_leaves_nothing_to_do():
    pool = FakePool(lambda r: [frame(r, 1, 2, 3, 4, 5, 6), failed(r)])
    events, _ = await run(pool)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.prompt_tokens, last.completion_tokens) == (FinishReason.LENGTH, 3, 6)
    assert len(pool.attempts) == 1


async def test_no_attempt_is_begun_after_the_deadline():
    clock = FakeClock()

    def lose_late(request: GenerateRequest) -> Iterable[Step]:
        clock.advance(11.0)
        yield failed(request)

    def lose_soon(request: GenerateRequest) -> Iterable[Step]:
        clock.advance(4.0)
        yield failed(request)

    pool = FakePool(lose_soon, lose_late)
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1,), sampling=REQUEST.sampling, timeout_s=10.0
    )
    events, _ = await run(pool, request=request, clock=clock)
    assert [attempt.timeout_s for attempt in pool.attempts] == [10.0, 6.0]
    (last,) = events
    assert isinstance(last, Failed)
    assert last.code is FailureCode.DEADLINE_EXCEEDED


async def test_closing_it_closes_the_attempt():
    forever = asyncio.Event()
    pool = FakePool(lambda r: [frame(r, 7), forever])
    backend = ResumingBackend(pool, PATIENT, clock=lambda: 0.0, on_loss=lambda _: None)
    events = backend.generate(REQUEST)
    await anext(events)
    await events.aclose()
    assert pool.num_open == 0
    assert await backend.is_ready()


async def test_what_is_said_of_the_prompt_is_said_once():
    """Lost before the first token, it is said again; lost after it, not asked for any more."""
    scores = [TokenLogprobs(logprob=-1.0, rank=rank) for rank in (1, 2)]

    def scored(request: GenerateRequest, *indexes: int) -> PromptFrame:
        return PromptFrame(
            attempt=request.attempt, logprobs=tuple(scores[index] for index in indexes)
        )

    pool = FakePool(
        lambda r: [scored(r, 0), failed(r)],
        lambda r: [scored(r, 0, 1), frame(r, 7), failed(r)],
        lambda r: [frame(r, 8), finished(r, 2)],
    )
    sampling = SamplingParams(max_tokens=6, prompt_logprobs=0)
    events, _ = await run(pool, request=replace(REQUEST, sampling=sampling))
    said = [entry for event in events if isinstance(event, PromptFrame) for entry in event.logprobs]
    assert said == scores
    assert tokens_of(events) == [7, 8]
    asked = [attempt.sampling.prompt_logprobs for attempt in pool.attempts]
    assert asked == [0, 0, None]


# The service stops -------------------------------------------------------------------------------


async def started(backend: ResumingBackend, pool: FakePool) -> asyncio.Task[list[GenerateEvent]]:
    """A request whose first attempt has begun."""

    async def collect() -> list[GenerateEvent]:
        return [event async for event in backend.generate(REQUEST)]

    task = asyncio.create_task(collect())
    await until(lambda: bool(pool.attempts))
    return task


@pytest.mark.parametrize("code", [FailureCode.WORKER_STOPPING, FailureCode.WORKER_LOST])
async def test_who_loses_its_worker_while_the_service_stops_hears_so_at_once(code):
    drained = asyncio.Event()
    pool = FakePool(lambda r: [beat(r), frame(r, 7), drained, failed(r, code)])
    backend = ResumingBackend(pool, PATIENT, clock=lambda: 0.0, on_loss=lambda _: None)
    task = await started(backend, pool)
    assert await backend.is_ready()
    backend.stop_resuming()
    assert not await backend.is_ready()
    drained.set()
    assert await task == [frame(REQUEST, 7), failed(REQUEST, code)]
    assert len(pool.attempts) == 1


async def test_what_its_worker_still_finishes_while_the_service_stops_is_finished():
    drained = asyncio.Event()
    pool = FakePool(
        lambda r: [frame(r, 7), drained, frame(r, 8), finished(r, 2)],
        lambda r: [frame(r, 1, 2, 3, 4, 5, 6), failed(r, FailureCode.WORKER_STOPPING)],
    )
    backend = ResumingBackend(pool, PATIENT, clock=lambda: 0.0, on_loss=lambda _: None)
    task = await started(backend, pool)
    backend.stop_resuming()
    drained.set()
    assert tokens_of(await task) == [7, 8]
    *_, last = [event async for event in backend.generate(REQUEST)]
    assert isinstance(last, Finished)  # all of its tokens have come


async def test_nothing_that_a_request_waits_for_outlasts_the_end_of_the_service():
    """A worker that does not drain, one that has not answered, and none at all."""
    forever = asyncio.Event()
    pool = FakePool(
        lambda r: [beat(r), frame(r, 7), forever],
        lambda _: [forever],
        lambda _: [forever],
    )
    losses: list[Loss] = []
    backend = ResumingBackend(pool, PATIENT, clock=lambda: 0.0, on_loss=losses.append)
    silent = await started(backend, pool)
    unanswered = asyncio.create_task(anext(backend.generate(REQUEST)))
    await until(lambda: len(pool.attempts) == 2)
    backend.end_all()
    late = await anext(backend.generate(REQUEST))
    for last in ((await silent)[-1], await unanswered, late):
        assert isinstance(last, Failed)
        assert last.code is FailureCode.WORKER_STOPPING
    assert losses == [Loss.STOPPING] * 3
    assert pool.num_open == 0
