"""Real decode workers behind channels, one of which is taken away: no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deployments.resume import Loss, ResumeConfig, ResumingBackend
from tests.fakes import channel
from tests.fakes.channel import PATIENCE_S
from tests.fakes.clock import FakeClock
from tests.fakes.model_runner import generate
from tests.fakes.until import until
from tests.fakes.worker_rig import ByteModelRunner, Rig, RigConfig, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.messages import Finished, GenerateRequest, TokenFrame, WorkerLoad

pytestmark = pytest.mark.timeout(PATIENCE_S * 2)

NUM_REQUESTS = 12
NUM_TOKENS = 10
PROMPT = (5, 3, 8)


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[Rig, channel.Rig, ResumingBackend, list[Loss]]]:
    losses: list[Loss] = []
    async with (
        worker_rig(RigConfig(num_decode=2, num_prefill=0, queue_limit=64)) as workers,
        channel.rig() as channels,
    ):
        backend = ResumingBackend(
            channels.pool,
            ResumeConfig(silence_s=30.0, answer_s=30.0, pause_s=0.0),
            clock=FakeClock(),
            on_loss=losses.append,
        )
        for number, end in enumerate(workers.decode_ends):
            await channels.add(f"replica-{number}", end.worker)
        await until(lambda: len(channels.pool._candidates()) == 2)
        yield workers, channels, backend, losses


def request(number: int) -> GenerateRequest:
    return generate_request((*PROMPT, number), SamplingParams(max_tokens=NUM_TOKENS), number=number)


async def answer(backend: ResumingBackend, asked: GenerateRequest) -> list[int]:
    """The tokens of an answer that ended by itself."""
    token_ids: list[int] = []
    async for event in backend.generate(asked):
        if isinstance(event, TokenFrame):
            token_ids += event.token_ids
        else:
            assert isinstance(event, Finished), event
    return token_ids


def runner_of(workers: Rig, number: int) -> ByteModelRunner:
    runner = workers.decode_ends[number].side.runner
    assert isinstance(runner, ByteModelRunner)
    return runner


def is_known_to_leave(channels: channel.Rig, worker: str) -> bool:
    """Whether the Front has heard that the worker leaves."""
    candidate = channels.pool._channels[worker].candidate
    return candidate is not None and candidate.load.is_leaving


@pytest.mark.parametrize("drain_s", [0.0, PATIENCE_S], ids=["hands all back", "finishes all"])
async def test_a_worker_that_is_taken_away_under_load_loses_no_request(drain_s: float) -> None:
    async with two_workers() as (workers, channels, backend, losses):
        # While both are held, every request gets to its worker, and none gets away.
        for number in range(2):
            runner_of(workers, number).hold()
        asking = [
            asyncio.create_task(answer(backend, request(number))) for number in range(NUM_REQUESTS)
        ]
        ends = workers.decode_ends
        await until(lambda: sum(end.worker.load().requests for end in ends) == NUM_REQUESTS)
        await until(runner_of(workers, 0).begun.is_set)

        server = channels.servers["replica-0"]
        server.leave()
        del channels.addresses["replica-0"]
        # What a Front sends before it has heard is handed back, however much time there is.
        await until(lambda: is_known_to_leave(channels, "replica-0"))
        draining = asyncio.create_task(ends[0].worker.drain(timeout_s=drain_s))
        later = [asyncio.create_task(answer(backend, request(99)))]
        for number in range(2):
            runner_of(workers, number).let_go()
        await draining
        await server.close()

        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*asking, *later)
        assert answers == [
            generate((*PROMPT, number), NUM_TOKENS) for number in (*range(NUM_REQUESTS), 99)
        ]
        assert {*losses} == (set() if drain_s else {Loss.STOPPING})


async def test_a_worker_s_load_is_what_it_has() -> None:
    async with two_workers() as (workers, _, backend, _):
        idle = WorkerLoad(takes_requests=True, requests=0, waiting=0, available_blocks=32)
        assert [end.worker.load() for end in workers.decode_ends] == [idle] * 2
        for number in range(2):
            runner_of(workers, number).hold()
        asking = [asyncio.create_task(answer(backend, request(number))) for number in range(6)]
        await until(lambda: sum(end.worker.load().requests for end in workers.decode_ends) == 6)
        assert all(end.worker.load().available_blocks < 32 for end in workers.decode_ends)
        for number in range(2):
            runner_of(workers, number).let_go()
        await asyncio.gather(*asking)
        assert [end.worker.load() for end in workers.decode_ends] == [idle] * 2
