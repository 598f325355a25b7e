"""The decode worker over a real sender and receiver, with a fake model: who computes what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kv_transfer import transfer_thread
from tests.fakes.model_runner import generate
from tests.fakes.prefill_call import prefill_request
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, RigConfig, Side, worker_rig
from tests.unit.workers.decode_requests import (
    NUM_TOKENS,
    PROMPT,
    assert_served,
    fill_pool,
    never_answer,
    reasons,
    request_of,
)
from workers.decode_config import DecodeConfig
from workers.engine.loop import MAX_STEP_S
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.messages import (
    FailureCode,
    FinishReason,
    Heartbeat,
    PrefillRefused,
    WorkerEvent,
)

BY_COST = RigConfig(
    decode=DecodeConfig(local_prefill_tokens=3, is_placed_by_cost=True, transfer_deadline_s=20.0)
)


# -- where a prompt is computed -------------------------------------------------------------------


async def test_prompt_is_computed_elsewhere_and_the_rest_here():
    async with worker_rig() as rig:
        end = await assert_served(Client(rig, request_of()))
        await rig.settled()

        assert end.prefilled_by == "prefill-0"
        assert rig.decode.stats()[0].prompt_tokens == 0
        assert rig.prefill_workers[0].stats()[0].prompt_tokens == len(PROMPT)
        assert rig.decode.stats()[2].placed("remote") == 1


async def test_first_token_that_stops_ends_the_request():
    first = generate(PROMPT, 1)[0]
    async with worker_rig() as rig:
        client = Client(rig, request_of(stop=frozenset({first})))
        end = await client.finished()
        await rig.settled()

        assert end.reason is FinishReason.STOP
        assert client.token_ids == []


async def test_short_prompt_stays_here():
    async with worker_rig() as rig:
        end = await assert_served(Client(rig, request_of(PROMPT[:3])), PROMPT[:3])

        assert end.prefilled_by == "decode-0"
        assert rig.prefill.requests == []
        assert rig.decode.stats()[2].placed("local") == 1


def seem_slow(side: Side) -> None:
    """Have the engine believe that it takes minutes for a prompt token."""
    row = ScheduledSequence(
        sequence_id=SequenceId(0), token_ids=PROMPT, start=0, block_tables=(), sampling=None
    )
    side.scheduler.pace.observe(StepPlan(step_id=0, sequences=(row,)), 1000.0)


async def test_by_cost_the_first_prompt_measures_the_hand_off_and_the_next_needs_none():
    async with worker_rig(BY_COST) as rig:
        first = await assert_served(Client(rig, request_of()))
        await rig.settled()
        second = await assert_served(Client(rig, request_of(PROMPT[1:])), PROMPT[1:])

        # The steps of both take no time on the rig's clock, a hand-off does.
        assert (first.prefilled_by, second.prefilled_by) == ("prefill-0", "decode-0")
        assert reasons(rig) == {"remote unmeasured": 1, "local cheaper": 1}


async def test_by_cost_a_worker_that_is_slow_with_prompts_hands_them_over():
    async with worker_rig(BY_COST) as rig:
        seem_slow(rig.side)
        await assert_served(Client(rig, request_of()))
        await rig.settled()
        await assert_served(Client(rig, request_of()))

        assert reasons(rig) == {"remote unmeasured": 1, "remote cheaper": 1}


async def test_by_cost_a_failed_hand_off_takes_back_what_was_known():
    async with worker_rig(BY_COST) as rig:
        seem_slow(rig.side)
        await assert_served(Client(rig, request_of()))
        await rig.settled()
        rig.generation_shift = 1
        await assert_served(Client(rig, request_of()))
        await rig.settled()
        rig.generation_shift = 0
        await assert_served(Client(rig, request_of()))

        assert reasons(rig) == {"remote unmeasured": 2, "fallback failed": 1}


async def test_every_reason_without_a_choice_is_counted_as_what_it_is():
    async with worker_rig() as rig:
        await assert_served(Client(rig, request_of()))
        await assert_served(Client(rig, request_of(PROMPT[:3])), PROMPT[:3])
        assert reasons(rig) == {"remote setting": 1, "local short": 1}
    async with worker_rig(RigConfig(num_prefill=0)) as rig:
        await assert_served(Client(rig, request_of()))
        assert reasons(rig) == {"local alone": 1}


async def test_colocated_worker_computes_every_prompt():
    async with worker_rig(RigConfig(num_prefill=0)) as rig:
        end = await assert_served(Client(rig, request_of()))
        assert end.prefilled_by == "decode-0"
        assert rig.decode.stats()[1] is None


async def test_requests_together_get_the_tokens_that_each_gets_alone():
    prompts = [tuple(range(number, number + 4 + number)) for number in range(12)]
    async with worker_rig() as rig:
        clients = [
            Client(rig, request_of(prompt, number=number)) for number, prompt in enumerate(prompts)
        ]
        for client, prompt in zip(clients, prompts, strict=True):
            await assert_served(client, prompt)
        await rig.settled()


# -- a request that another decode worker lost ----------------------------------------------------


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize("num_emitted", [1, 5, NUM_TOKENS - 1])
async def test_resumed_request_goes_on_where_the_lost_worker_was(num_prefill, num_emitted):
    whole = generate(PROMPT, NUM_TOKENS)
    emitted = tuple(whole[:num_emitted])
    async with worker_rig(RigConfig(num_prefill=num_prefill)) as rig:
        client = Client(rig, replace(request_of(), attempt=1, resumed_token_ids=emitted))
        end = await client.finished()
        await rig.settled()

        assert client.token_ids == whole[num_emitted:]
        assert (end.prompt_tokens, end.completion_tokens) == (len(PROMPT), NUM_TOKENS)
        assert end.reason is FinishReason.LENGTH
        computed = [worker.stats()[0].prompt_tokens for worker in rig.prefill_workers]
        assert sum(computed, rig.decode.stats()[0].prompt_tokens) == len(PROMPT) + num_emitted


async def test_quiet_request_shows_signs_of_life():
    config = RigConfig(
        decode=DecodeConfig(
            local_prefill_tokens=3,
            transfer_deadline_s=99.0,
            accept_timeout_s=99.0,
            heartbeat_s=0.01,
        )
    )

    async with worker_rig(config) as rig:
        rig.prefill.script = [never_answer]
        events = rig.decode.generate(request_of())
        beats = [await anext(events) for _ in range(3)]
        await events.aclose()

    assert beats == [Heartbeat(attempt=0, worker="decode-0")] * 3


async def read(events: AsyncIterator[WorkerEvent], number: int) -> list[WorkerEvent]:
    return [await anext(events) for _ in range(number)]


async def test_request_in_a_step_that_hangs_shows_no_signs_of_life():
    """Its reader goes on elsewhere; that this process lives is of no use to it."""
    config = RigConfig(
        decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=99.0, heartbeat_s=0.01)
    )

    async with worker_rig(config) as rig:
        rig.side.runner.hold()
        events = rig.decode.generate(request_of(PROMPT[:3]))
        assert isinstance(await anext(events), Heartbeat)
        rig.clock.advance(MAX_STEP_S + 1)
        reading = asyncio.create_task(read(events, 3))  # one may have been sent before
        _, pending = await asyncio.wait({reading}, timeout=0.2)
        assert pending == {reading}
        reading.cancel()
        await asyncio.wait({reading})
        assert not rig.decode.healthy
        assert not rig.decode.load().takes_requests
        rig.side.runner.let_go()


async def test_workers_whose_transfer_thread_hangs_take_nothing_more_and_can_stop(monkeypatch):
    monkeypatch.setattr(transfer_thread, "MAX_TURN_S", 0.01)
    going_on = threading.Event()
    async with worker_rig() as rig:
        prefill = rig.prefill_workers[0]
        assert rig.decode.healthy
        assert prefill.healthy
        for thread in (rig.receiver._thread, prefill._sender._thread):
            thread.post(going_on.wait)

        await until(lambda: not rig.decode.healthy and not prefill.healthy)

        assert not rig.decode.load().takes_requests
        end = await assert_served(Client(rig, request_of()))  # one that was on its way
        assert end.prefilled_by == "decode-0"
        assert reasons(rig) == {"local resting": 1}
        (refused,) = [event async for event in prefill.prefill(prefill_request())]
        assert isinstance(refused, PrefillRefused)
        async with asyncio.timeout(10.0):
            await prefill.stop()
            await rig.decode.stop()

        going_on.set()
        await until(lambda: rig.decode._receiver.healthy and prefill._sender.healthy)


# -- refusals -------------------------------------------------------------------------------------


async def test_request_beyond_the_window_is_refused():
    async with worker_rig() as rig:
        failed = await Client(rig, request_of(max_tokens=55)).failed()
        assert failed.code is FailureCode.CONTEXT_LENGTH_EXCEEDED
        assert (failed.attempt, failed.retry_after_s) == (0, None)
        assert rig.prefill.requests == []


async def test_full_queue_says_when_to_come_again():
    async with worker_rig(RigConfig(queue_limit=0)) as rig:
        fillers = await fill_pool(rig)
        failed = await Client(rig, request_of()).failed()
        assert failed.code is FailureCode.QUEUE_FULL
        assert failed.retry_after_s is not None
        assert failed.retry_after_s > 0
        for filler in fillers:
            filler.leave()
        rig.side.runner.let_go()
        await rig.settled()


async def test_stopped_worker_refuses():
    async with worker_rig() as rig:
        await rig.decode.stop()
        failed = await Client(rig, request_of()).failed()
        assert failed.code is FailureCode.WORKER_STOPPING
        assert not rig.decode.healthy


async def test_generator_that_is_closed_before_its_first_step_costs_nothing():
    async with worker_rig() as rig:
        events = rig.decode.generate(request_of())
        await events.aclose()
        assert rig.held() == []
        assert rig.prefill.requests == []
