"""A hand-off that fails: it is tried again, or the prompt is computed on decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kv_transfer.transport import PeerLostError
from tests.fakes.transport import Fault, FaultKind
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, RigConfig, worker_rig
from tests.unit.workers.decode_requests import (
    NUM_TOKENS,
    PROMPT,
    assert_served,
    faulty_rig,
    never_answer,
    reasons,
    request_of,
)
from workers.decode_config import DecodeConfig
from workers.messages import (
    FailureCode,
    PrefillEnded,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
)

ONE_BLOCK = PROMPT[:4]
"""The shortest prompt that is handed over: one grant, one block, one verdict."""
SHORT = RigConfig(decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=0.3))


async def refuse(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    yield PrefillRefused(code=FailureCode.QUEUE_FULL, message="full")


async def lose(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    raise PeerLostError("the replica died")
    yield


async def end_silently(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    return
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
