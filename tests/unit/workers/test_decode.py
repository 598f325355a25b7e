"""The decode worker over a real sender and receiver, with a fake model and prepared failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kv_transfer.transport import Landed, PeerLostError
from tests.fakes.model_runner import generate
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, Side, generate_request, worker_rig
from workers.decode_config import DecodeConfig
from workers.engine.loop import MAX_STEP_S
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.messages import (
    FailureCode,
    Finished,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    PrefillEnded,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
    WorkerEvent,
)

PROMPT = (5, 3, 8, 1, 9, 2, 7, 4, 6, 11)
ONE_BLOCK = PROMPT[:4]
"""The shortest prompt that is handed over: one grant, one block, one verdict."""
NUM_TOKENS = 12
SHORT = RigConfig(decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=0.3))
PATIENT = RigConfig(
    decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=99.0, accept_timeout_s=99.0)
)
"""A hand-off ends by what a test does, never by itself."""
BY_COST = RigConfig(
    decode=DecodeConfig(local_prefill_tokens=3, is_placed_by_cost=True, transfer_deadline_s=20.0)
)
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


# -- where a prompt is computed -----------------------------------------------------------------


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


def reasons(rig: Rig) -> dict[str, int]:
    """How often a prompt was placed for which reason."""
    prompts = rig.decode.stats()[2].prompts
    return {f"{place} {reason.value}": count for (place, reason), count in prompts.items()}


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


# -- a request that another decode worker lost ---------------------------------------------------


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


# -- a hand-off that fails ----------------------------------------------------------------------


async def refuse(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    yield PrefillRefused(code=FailureCode.QUEUE_FULL, message="full")


async def lose(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    raise PeerLostError("the replica died")
    yield


async def end_silently(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    return
    yield


async def never_answer(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    await asyncio.Event().wait()
    yield


ANSWERS: dict[str, Callable[[PrefillRequest], AsyncIterator[PrefillEvent]]] = {
    "HandoffRefusedError": refuse,
    "PeerLostError": lose,
    "PeerLostError ": end_silently,
}

LINK_FAULTS = {
    "PeerLostError": Fault(FaultKind.DIE, 1),
    "PeerLostError ": Fault(FaultKind.DIE, 2),
    "CorruptTransferError": Fault(FaultKind.CORRUPT, 1),
    "CorruptTransferError ": Fault(FaultKind.TRUNCATE, 0),
    "TransferDeadlineError": Fault(FaultKind.HANG, 1),
    "TransferDeadlineError ": Fault(FaultKind.HANG, 0),
}


@pytest.mark.parametrize("error", ANSWERS)
@pytest.mark.parametrize("attempts", [1, 2])
async def test_answer_other_than_acceptance_is_retried_and_then_done_here(error, attempts):
    async with worker_rig() as rig:
        rig.prefill.script = [ANSWERS[error]] * attempts
        end = await assert_served(Client(rig, request_of()))
        await rig.settled()

        assert end.prefilled_by == ("prefill-1" if attempts == 1 else "decode-0")
        assert rig.decode.stats()[2].failures == {error.strip(): attempts}
        assert [request.epoch for request in rig.prefill.requests] == [0, 1]


@pytest.mark.parametrize("error", LINK_FAULTS)
@pytest.mark.parametrize("attempts", [1, 2])
async def test_link_fault_is_retried_and_then_done_here(error, attempts):
    async with faulty_rig(LINK_FAULTS[error], sessions=attempts, config=SHORT) as rig:
        end = await assert_served(Client(rig, request_of()))
        await rig.settled()

        assert end.prefilled_by == ("prefill-1" if attempts == 1 else "decode-0")
        assert rig.decode.stats()[2].failures == {error.strip(): attempts}
        assert len({request.transfer_id for request in rig.prefill.requests}) == 2


async def test_blocks_that_changed_are_not_used():
    """INVALID at confirm: the bytes that landed may be somebody else's."""

    def recover(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        rig.generation_shift = 0
        return rig.prefill_workers[1].prefill(request)

    async with faulty_rig(Fault(FaultKind.DELAY, 1)) as rig:
        client = Client(rig, request_of(ONE_BLOCK))
        await rig.transport.faulty.wait_reached()
        rig.generation_shift = 1
        rig.prefill.script = [recover]
        rig.transport.faulty.resume()
        await assert_served(client, ONE_BLOCK)
        await rig.settled()

        assert rig.decode.stats()[2].failures == {"InvalidTransferError": 1}


async def test_step_that_fails_on_prefill_is_retried():
    async with worker_rig() as rig:
        rig.prefill_sides[0].runner.errors = [RuntimeError("broken step")]
        end = await assert_served(Client(rig, request_of()))
        await rig.settled()

        assert end.prefilled_by == "prefill-1"
        assert rig.decode.stats()[2].failures == {"LeaseLostError": 1}


async def test_prefill_worker_that_stops_is_replaced():
    async with worker_rig() as rig:
        rig.prefill_sides[0].runner.hold()
        client = Client(rig, request_of())
        await until(rig.prefill_sides[0].runner.begun.is_set)
        stopping = asyncio.create_task(rig.prefill_workers[0].stop())
        end = await assert_served(client)
        rig.prefill_sides[0].runner.let_go()
        await stopping
        await rig.settled()

        assert end.prefilled_by == "prefill-1"


async def test_wrong_first_answer_is_not_believed():
    async def end_first(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        async for event in rig.prefill_workers[0].prefill(request):
            yield PrefillEnded(key=event.key, outcome="confirmed", load=event.load)

    async with worker_rig() as rig:
        rig.prefill.script = [end_first]
        await assert_served(Client(rig, request_of()))
        await rig.settled()

        assert rig.decode.stats()[2].failures == {"PeerLostError": 1}


async def test_pool_that_does_not_answer_rests():
    rest_s = 7.0
    quick = DecodeConfig(
        local_prefill_tokens=3, transfer_deadline_s=20.0, accept_timeout_s=0.02, rest_s=rest_s
    )
    async with worker_rig(RigConfig(decode=quick)) as rig:
        rig.prefill.script = [never_answer]
        end = await assert_served(Client(rig, request_of()))
        assert end.prefilled_by == "decode-0"
        assert len(rig.prefill.requests) == 1, "one wait is enough to know"

        end = await assert_served(Client(rig, request_of()))
        assert end.prefilled_by == "decode-0"
        assert len(rig.prefill.requests) == 1
        assert reasons(rig) == {"fallback failed": 1, "local resting": 1}

        rig.clock.advance(rest_s)
        end = await assert_served(Client(rig, request_of()))
        assert end.prefilled_by == "prefill-1"
        await rig.settled()


async def test_bug_in_a_hand_off_ends_the_request_visibly(caplog):
    async def break_down(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        raise KeyError("a bug")
        yield

    async with worker_rig() as rig:
        rig.prefill.script = [break_down]
        failed = await Client(rig, request_of()).failed()
        await rig.settled()

        assert failed.code is FailureCode.INTERNAL
        assert "hand-off broke request_id=request-0" in caplog.text


@pytest.mark.parametrize("error", [PeerLostError("no fence"), asyncio.CancelledError()])
async def test_blocks_are_given_up_rather_than_freed_without_a_fence(error):
    async with faulty_rig(Fault(FaultKind.DIE, 2)) as rig:
        rig.transport.close_error = error
        failed = await Client(rig, request_of()).failed()
        await until(lambda: rig.decode.stats()[2].active == 0)

        assert failed.code is FailureCode.INTERNAL
        assert rig.side.pool.counts().quarantined == rig.side.pool.blocks_for(
            len(PROMPT) + NUM_TOKENS
        )
        assert len(rig.prefill.requests) == 1, "no other attempt may write there"
        await assert_served(Client(rig, request_of(PROMPT[:3])), PROMPT[:3])


# -- refusals -----------------------------------------------------------------------------------


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


# -- an end from outside, in every phase --------------------------------------------------------


async def fill_pool(rig: Rig) -> list[Client]:
    """Take every block of the decode worker, and keep its step in flight."""
    rig.side.runner.hold()
    fillers = [Client(rig, request_of((1, 2), max_tokens=62, number=90 + i)) for i in range(2)]
    await until(rig.side.runner.begun.is_set)
    await until(lambda: rig.side.pool.num_available == 0)
    return fillers


class Stage:
    """A request that has been brought to a phase, and what keeps it there."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.client: Client
        self.fillers: list[Client] = []
        self.closed = asyncio.Event()

    async def queued(self) -> None:
        """No room for its blocks."""
        self.fillers = await fill_pool(self.rig)
        self._ask()
        await until(lambda: self.rig.side.scheduler.num_waiting == 1)

    async def asking(self) -> None:
        """The prefill worker has not answered."""
        self.rig.prefill.script = [never_answer]
        self._ask()
        await until(lambda: len(self.rig.prefill.requests) == 1)

    async def computing(self) -> None:
        """Accepted; nothing is granted."""
        self.rig.prefill_sides[0].runner.hold()
        self._ask()
        await until(self.rig.prefill_sides[0].runner.begun.is_set)
        await until(lambda: self.rig.receiver.stats().active == 1)

    async def fetching(self) -> None:
        """Granted; some piece does not come."""
        self._ask()
        await self.rig.transport.faulty.wait_reached()
        await until(self.rig.transport.fetching.is_set)

    async def fencing(self) -> None:
        """Confirmed; the session has not passed its fence."""
        self.rig.transport.faulty.hold_fence()
        self._ask()
        await self.rig.transport.faulty.wait_closing()

    async def closing(self) -> None:
        """VALID and published; the call to the prefill worker has not ended."""

        closing = asyncio.Event()

        async def close_slowly(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
            answers = self.rig.prefill_workers[0].prefill(request)
            try:
                async for answer in answers:
                    yield answer
            finally:
                closing.set()
                await self.closed.wait()
                await answers.aclose()

        self.rig.prefill.script = [close_slowly]
        self._ask()
        await closing.wait()
        assert self.rig.receiver.stats().by_outcome == {"landed": 1}

    async def decoding(self) -> None:
        """The first token is out, and a step in flight."""
        self.rig.side.runner.hold()
        self._ask()
        await self.client.first_token()
        await until(self.rig.side.runner.begun.is_set)

    def open(self) -> None:
        """Let everything go on."""
        for filler in self.fillers:
            filler.leave()
        self.closed.set()
        for side in (self.rig.side, *self.rig.prefill_sides):
            side.runner.let_go()
        self.rig.transport.faulty.pass_fence()
        self.rig.transport.faulty.resume()

    def _ask(self) -> None:
        self.client = Client(self.rig, request_of(timeout_s=FOREVER_S))


PHASES = ("queued", "asking", "computing", "fetching", "fencing", "closing", "decoding")


@asynccontextmanager
async def stage_at(phase: str) -> AsyncIterator[Stage]:
    faults = (Fault(FaultKind.DELAY, 1),) if phase == "fetching" else ()
    async with faulty_rig(*faults, config=PATIENT) as rig:
        stage = Stage(rig)
        await getattr(stage, phase)()
        try:
            yield stage
        finally:
            stage.open()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
async def test_caller_that_leaves_holds_nothing(phase, times):
    async with stage_at(phase) as stage:
        for _ in range(times):
            stage.client.leave()
            await asyncio.sleep(0)
        await stage.client.left()
        stage.open()
        await stage.rig.settled()

        assert stage.client.ends == []
        assert len(stage.rig.prefill.requests) <= 1


@pytest.mark.parametrize("phase", PHASES)
async def test_deadline_ends_the_request_and_holds_nothing(phase):
    async with stage_at(phase) as stage:
        stage.rig.expire()
        if phase in ("queued", "decoding"):
            stage.rig.side.runner.let_go()  # deadlines are looked at between two steps
        failed = await stage.client.failed()
        stage.open()
        await stage.rig.settled()

        assert failed.code is FailureCode.DEADLINE_EXCEEDED
        assert len(stage.rig.prefill.requests) <= 1


@pytest.mark.parametrize("phase", PHASES)
async def test_stop_ends_the_request_with_a_reply(phase):
    async with stage_at(phase) as stage:
        stopping = asyncio.create_task(stage.rig.decode.stop())
        failed = await stage.client.failed()
        stage.open()
        await stopping
        await stage.rig.settled()

        assert failed.code is FailureCode.WORKER_STOPPING
        assert len(stage.rig.prefill.requests) <= 1


@pytest.mark.parametrize("phase", ["asking", "computing", "fetching", "fencing"])
async def test_engine_that_fails_ends_the_hand_off(phase):
    async with stage_at(phase) as stage:
        rig = stage.rig
        rig.side.runner.errors = [RuntimeError("broken"), RuntimeError("broken again")]
        for number in (1, 2):
            await Client(rig, request_of(PROMPT[:2], number=number)).failed()
        failed = await stage.client.failed()
        stage.open()
        await until(lambda: rig.decode.stats()[2].active == 0)
        await until(lambda: all(side.is_empty for side in rig.prefill_sides))

        assert failed.code is FailureCode.WORKER_STOPPING
        assert not rig.decode.healthy
        assert rig.receiver.stats().active == 0


async def test_stop_before_the_hand_off_took_its_first_step_frees_its_blocks():
    async with worker_rig() as rig:
        client = Client(rig, request_of())
        await asyncio.sleep(0)  # the request is queued, its hand-off a task that has not run
        assert rig.decode.stats()[2].active == 1
        await rig.decode.stop()
        failed = await client.failed()
        await rig.settled()

        assert failed.code is FailureCode.WORKER_STOPPING
        assert rig.prefill.requests == []


async def test_deadline_frees_the_hand_off_of_a_caller_that_reads_no_more():
    """Front may be slow to close: what a request held must not depend on it."""
    async with stage_at("asking") as stage:
        events = stage.rig.decode.generate(request_of(number=1, timeout_s=FOREVER_S))
        stage.rig.prefill.script = [never_answer]
        reading = asyncio.create_task(anext(events))
        await until(lambda: len(stage.rig.prefill.requests) == 2)
        stage.rig.expire()
        await reading
        await stage.client.failed()
        await stage.rig.settled()
        await events.aclose()


async def test_caller_that_leaves_during_the_fence_ends_the_attempts():
    async with faulty_rig(Fault(FaultKind.DIE, 2)) as rig:
        rig.transport.faulty.hold_fence()
        client = Client(rig, request_of())
        await rig.transport.faulty.wait_closing()
        client.leave()
        await client.left()
        assert rig.side.pool.counts().quarantined > 0
        rig.transport.faulty.pass_fence()
        await rig.settled()

        assert len(rig.prefill.requests) == 1
        assert rig.decode.stats()[2].placed("fallback") == 0


class LateFence:
    """A transfer that has failed while its transport may still write."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.passed = asyncio.Event()

    async def pull(self) -> Landed:
        raise PeerLostError("the connection has ended")

    async def wait_quiesced(self) -> None:
        self.waiting.set()
        await self.passed.wait()


async def test_caller_that_leaves_cannot_cut_the_wait_for_the_fence_short(monkeypatch):
    async with worker_rig() as rig:
        transfer = LateFence()
        monkeypatch.setattr(rig.receiver, "transfer", lambda **_order: transfer)
        client = Client(rig, request_of())
        await transfer.waiting.wait()
        client.leave()
        await client.left()
        stopping = asyncio.create_task(rig.decode.stop())
        await until(lambda: not rig.decode.healthy)
        assert rig.side.pool.counts().quarantined > 0
        assert not stopping.done()
        transfer.passed.set()
        await stopping
        await rig.settled()

        assert len(rig.prefill.requests) == 1


@pytest.mark.parametrize("fault", [(), (Fault(FaultKind.DIE, 2),)], ids=["landed", "lost"])
async def test_blocks_stay_in_quarantine_until_the_fence(fault):
    async with faulty_rig(*fault) as rig:
        rig.transport.faulty.hold_fence()
        client = Client(rig, request_of(timeout_s=FOREVER_S))
        await rig.transport.faulty.wait_closing()
        rig.expire()
        await client.failed()
        assert rig.side.pool.counts().quarantined == 6
        assert rig.side.pool.counts().free == 26
        rig.transport.faulty.pass_fence()
        await rig.settled()


async def test_time_left_bounds_what_prefill_is_asked_for():
    async with worker_rig() as rig:
        await assert_served(Client(rig, request_of(timeout_s=6.0)))
        await assert_served(Client(rig, request_of()))
        assert [request.timeout_s for request in rig.prefill.requests] == [6.0, 20.0]


async def test_drain_lets_what_runs_finish_and_takes_nothing_more():
    async with stage_at("decoding") as stage:
        draining = asyncio.create_task(stage.rig.decode.drain(timeout_s=FOREVER_S))
        await asyncio.sleep(0)
        refused = await Client(stage.rig, request_of(number=1)).failed()
        stage.open()
        await assert_served(stage.client)
        await draining

        assert refused.code is FailureCode.WORKER_STOPPING
        assert not stage.rig.decode.healthy


async def test_drain_fails_what_does_not_finish_in_time():
    async with stage_at("asking") as stage:
        draining = asyncio.create_task(stage.rig.decode.drain(timeout_s=0.01))
        failed = await stage.client.failed()
        stage.open()
        await draining
        await stage.rig.settled()

        assert failed.code is FailureCode.WORKER_STOPPING


async def test_drain_of_an_idle_worker_stops_it_at_once():
    async with worker_rig() as rig:
        await rig.decode.drain(timeout_s=FOREVER_S)

        assert not rig.decode.healthy
