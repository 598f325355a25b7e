"""A request's end from outside, in every phase: it is told once, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kv_transfer.transport import Landed, PeerLostError
from tests.fakes.transport import Fault, FaultKind
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, worker_rig
from tests.unit.workers.decode_requests import (
    FOREVER_S,
    PROMPT,
    assert_served,
    faulty_rig,
    fill_pool,
    never_answer,
    request_of,
)
from workers.decode_config import DecodeConfig
from workers.messages import (
    FailureCode,
    PrefillEvent,
    PrefillRequest,
)

PATIENT = RigConfig(
    decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=99.0, accept_timeout_s=99.0)
)
"""A hand-off ends by what a test does, never by itself."""


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


# -- the end of the worker ------------------------------------------------------------------------


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
