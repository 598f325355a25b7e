"""Requests to a decode worker, the rigs that they meet, and what is asked of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tests.fakes.model_runner import generate
from tests.fakes.transport import Fault, FaultyTransport
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.messages import (
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillEvent,
    PrefillRequest,
)

PROMPT = (5, 3, 8, 1, 9, 2, 7, 4, 6, 11)
NUM_TOKENS = 12
FOREVER_S = 500.0
"""On the fake clock, which no test moves this far by accident."""


def request_of(
    prompt: tuple[int, ...] = PROMPT,
    *,
    max_tokens: int = NUM_TOKENS,
    number: int = 0,
    timeout_s: float | None = None,
    stop: frozenset[int] = frozenset(),
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    return generate_request(prompt, sampling, number=number, timeout_s=timeout_s)


def faulty_rig(*faults: Fault, sessions: int = 1, config: RigConfig | None = None):
    """Workers whose first sessions suffer these faults."""
    return worker_rig(
        config,
        transport=FaultyTransport(),
        faults_of=lambda number: faults if number < sessions else (),
    )


async def assert_served(client: Client, prompt: tuple[int, ...] = PROMPT) -> Finished:
    """The request ended by itself with the model's own tokens."""
    end = await client.finished()
    assert client.token_ids == generate(prompt, NUM_TOKENS)
    assert (end.prompt_tokens, end.completion_tokens) == (len(prompt), NUM_TOKENS)
    assert end.reason is FinishReason.LENGTH
    return end


def reasons(rig: Rig) -> dict[str, int]:
    """How often a prompt was placed for which reason."""
    prompts = rig.decode.stats()[2].prompts
    return {f"{place} {reason.value}": count for (place, reason), count in prompts.items()}


async def fill_pool(rig: Rig) -> list[Client]:
    """Take every block of the decode worker, and keep its step in flight."""
    rig.side.runner.hold()
    fillers = [Client(rig, request_of((1, 2), max_tokens=62, number=90 + i)) for i in range(2)]
    await until(rig.side.runner.begun.is_set)
    await until(lambda: rig.side.pool.num_available == 0)
    return fillers


async def never_answer(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    await asyncio.Event().wait()
    yield
