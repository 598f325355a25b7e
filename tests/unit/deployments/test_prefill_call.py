"""The call for a prompt, from a decode worker's pool to a prefill worker and back."""

from __future__ import annotations

import logging
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import grpc
import msgspec
import pytest
from ray.exceptions import RayError

from deployments.call_gate import CallGate
from deployments.handles import PrefillPool
from deployments.prefill_call import PrefillCall, PrefillDoor
from kv_transfer.authentication import Purpose
from kv_transfer.handoff import ReleaseReason
from kv_transfer.sealing import REFUSAL, OpenedCall, SealedCall
from kv_transfer.transport import LinkRefusedError, NotAuthenticatedError, PeerLostError
from tests.fakes.prefill_call import (
    OTHER_SECRET,
    SECRET,
    FakePrefill,
    FakePrefillHandle,
    answers,
    prefill_request,
)
from tests.fakes.worker_rig import Client, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.messages import FailureCode, PrefillEvent, PrefillRefused

REQUEST = prefill_request()
ACCEPTED, ENDED = answers()
REFUSED = PrefillRefused(code=FailureCode.QUEUE_FULL, message="full")

Answers = list[bytes]


def door(*events: PrefillEvent) -> PrefillDoor:
    return PrefillDoor(FakePrefill(*events), gate=CallGate(SECRET))


def pool(*replicas: Callable[[bytes], AsyncGenerator[object, None]]) -> PrefillPool:
    return PrefillPool(FakePrefillHandle(*replicas), secret=SECRET)


async def all_of(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


@pytest.mark.parametrize("events", [[ACCEPTED, ENDED], [REFUSED], []])
async def test_request_and_answers_come_as_they_were_sent(events):
    worker = FakePrefill(*events)
    handle = FakePrefillHandle(PrefillDoor(worker, gate=CallGate(SECRET)).prefill)

    heard = await all_of(PrefillPool(handle, secret=SECRET).prefill(REQUEST))

    assert heard == events
    assert worker.requests == [REQUEST]
    assert handle.num_cancelled == 0


async def test_what_an_answer_is_made_of_is_not_unpickled():
    handle = FakePrefillHandle(door().prefill)
    await all_of(PrefillPool(handle, secret=SECRET).prefill(REQUEST))
    assert handle.serializations == ["noop"]


@pytest.mark.parametrize(
    "message",
    [
        PrefillCall(OTHER_SECRET, REQUEST).message,
        SealedCall(SECRET, Purpose.TOKEN_CHANNEL, msgspec.msgpack.encode(REQUEST)).message,
        PrefillCall(SECRET, REQUEST).message[:-1],
        msgspec.msgpack.encode(REQUEST),
        pickle.dumps(REQUEST),
        REQUEST,
        None,
    ],
    ids=["other secret", "other purpose", "cut", "plain", "pickle", "object", "nothing"],
)
async def test_a_stranger_s_call_is_refused_counted_and_heard_by_nobody(message, caplog):
    worker = FakePrefill(ACCEPTED, ENDED)
    gate = CallGate(SECRET)
    entrance = PrefillDoor(worker, gate=gate)

    with caplog.at_level(logging.WARNING):
        heard = await all_of(entrance.prefill(message))

    assert heard == [REFUSAL]
    assert worker.requests == []
    assert gate.num_strangers == 1
    (line,) = caplog.messages
    assert line.startswith("prefill call refused reason=")
    assert not any(text in line for text in ("transfer-0", "salt", "100"))


async def test_who_knows_the_secret_is_no_stranger():
    gate = CallGate(SECRET)
    entrance = PrefillDoor(FakePrefill(ACCEPTED), gate=gate)
    await all_of(entrance.prefill(PrefillCall(SECRET, REQUEST).message))
    assert gate.num_strangers == 0


async def test_a_request_of_another_version_is_refused_in_words():
    worker = FakePrefill(ACCEPTED)
    gate = CallGate(SECRET)
    entrance = PrefillDoor(worker, gate=gate)

    async def call_with(body: bytes) -> list[object]:
        call = SealedCall(SECRET, Purpose.PREFILL_CALL, body)
        opened = [call.open(answer) for answer in await all_of(entrance.prefill(call.message))]
        return [msgspec.msgpack.decode(answer) for answer in opened]

    for body in (b"", b"\xc1", msgspec.msgpack.encode({"request_id": 5})):
        ((kind, event),) = await call_with(body)
        assert (kind, event["code"]) == (2, "internal")
        assert "does not speak this version" in event["message"]
    assert (worker.requests, gate.num_strangers) == ([], 0)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode((7, {})), msgspec.msgpack.encode((-1, {}))]
)
async def test_an_answer_of_another_version_is_a_refused_link(body):
    async def replica(message: bytes) -> AsyncGenerator[object, None]:
        yield OpenedCall(SECRET, Purpose.PREFILL_CALL, message).seal(body)

    with pytest.raises(LinkRefusedError, match="does not speak this version"):
        await all_of(pool(replica).prefill(REQUEST))


def changed(message: bytes, change: Callable[[Answers, Answers], list[object]]) -> list[object]:
    """What somebody makes of the answers to this call and to another one like it."""

    def sealed(message: bytes) -> Answers:
        opened = OpenedCall(SECRET, Purpose.PREFILL_CALL, message)
        events = enumerate((ACCEPTED, ENDED))
        return [opened.seal(msgspec.msgpack.encode(event)) for event in events]

    return change(sealed(message), sealed(PrefillCall(SECRET, REQUEST).message))


@pytest.mark.parametrize(
    ("change", "num_good"),
    [
        (lambda ours, theirs: [theirs[0], ours[1]], 0),
        (lambda ours, theirs: [ours[0], theirs[1]], 1),
        (lambda ours, _: [ours[1], ours[0]], 0),
        (lambda ours, _: [ours[1]], 0),
        (lambda ours, _: [ours[0], ours[0]], 1),
        (lambda ours, _: [ours[0], ours[1], ours[1]], 2),
        (lambda ours, _: [ours[0][:-1], ours[1]], 0),
        (lambda ours, _: [ACCEPTED, ours[1]], 0),
        (lambda ours, _: [pickle.dumps(ACCEPTED), ours[1]], 0),
        (lambda *_: [REFUSAL], 0),
    ],
    ids=[
        "another call's first",
        "another call's last",
        "reordered",
        "first left out",
        "repeated",
        "last repeated",
        "cut",
        "unsealed",
        "pickled",
        "refused as a stranger",
    ],
)
async def test_an_answer_that_is_not_the_next_one_ends_the_call(change, num_good):
    async def replica(message: bytes) -> AsyncGenerator[object, None]:
        for answer in changed(message, change):
            yield answer

    handle = FakePrefillHandle(replica)
    hearing = PrefillPool(handle, secret=SECRET).prefill(REQUEST)

    assert [await anext(hearing) for _ in range(num_good)] == [ACCEPTED, ENDED][:num_good]
    with pytest.raises(NotAuthenticatedError):
        await anext(hearing)
    assert handle.num_cancelled == 1


@pytest.mark.parametrize(
    "error",
    [RayError("dead"), grpc.RpcError(), RuntimeError("no such code"), TypeError("raise b''")],
)
async def test_a_call_that_serve_fails_is_a_lost_peer(error):
    async def replica(message: bytes) -> AsyncGenerator[object, None]:
        opened = OpenedCall(SECRET, Purpose.PREFILL_CALL, message)
        yield opened.seal(msgspec.msgpack.encode((0, ACCEPTED)))
        raise error

    hearing = pool(replica).prefill(REQUEST)
    assert await anext(hearing) == ACCEPTED
    with pytest.raises(PeerLostError, match=type(error).__name__):
        await anext(hearing)


async def test_who_stops_listening_cancels_the_call():
    handle = FakePrefillHandle(door(ACCEPTED, ENDED).prefill)
    async with aclosing(PrefillPool(handle, secret=SECRET).prefill(REQUEST)) as hearing:
        await anext(hearing)
    assert handle.num_cancelled == 1


# With real workers.

PROMPT = range(100, 110)


async def tokens_by(*replicas: str) -> tuple[list[int], dict[str, int], int]:
    """A request's output where calls go to such replicas, failed attempts, and strangers."""
    async with worker_rig() as rig:
        gate = CallGate(SECRET)
        entrance = PrefillDoor(rig.prefill_workers[0].prefill, gate=gate)

        async def impostor(message: bytes) -> AsyncGenerator[object, None]:
            """Takes whatever comes, and answers in a worker's words."""
            own = PrefillCall(OTHER_SECRET, REQUEST).message
            opened = OpenedCall(OTHER_SECRET, Purpose.PREFILL_CALL, own)
            yield opened.seal(msgspec.msgpack.encode((0, ACCEPTED)))

        async def cut(message: bytes) -> AsyncGenerator[object, None]:
            """Its last answer is lost, once the prompt is handed over."""
            async with aclosing(entrance.prefill(message)) as answering:
                yield await anext(answering)
                await anext(answering)

        kinds = {"worker": entrance.prefill, "impostor": impostor, "cut": cut}
        calls = pool(*(kinds[name] for name in replicas))
        rig.prefill.script = [calls.prefill] * len(replicas)
        client = Client(rig, generate_request(PROMPT, SamplingParams(max_tokens=4, temperature=0)))
        await client.finished()
        await rig.settled()
        handoff = rig.decode.stats()[2]
        return client.token_ids, dict(handoff.failures), gate.num_strangers


async def test_an_impostor_is_a_failed_attempt_and_no_token():
    expected, none, _ = await tokens_by("worker")
    assert none == {}

    assert await tokens_by("impostor", "worker") == (expected, {"NotAuthenticatedError": 1}, 0)
    assert await tokens_by("impostor", "impostor") == (expected, {"NotAuthenticatedError": 2}, 0)


async def test_an_answer_that_decode_does_not_take_ends_its_lease():
    """At once, by the cancelled call: not when the lease has expired."""
    async with worker_rig() as rig:
        entrance = PrefillDoor(rig.prefill_workers[0].prefill, gate=CallGate(SECRET))

        async def damaged(message: bytes) -> AsyncGenerator[object, None]:
            async with aclosing(entrance.prefill(message)) as answering:
                async for answer in answering:
                    yield answer[:-1] + bytes([answer[-1] ^ 1])

        calls = pool(damaged)
        rig.prefill.script = [calls.prefill] * 2
        client = Client(rig, generate_request(PROMPT, SamplingParams(max_tokens=4, temperature=0)))
        await client.finished()
        await rig.settled()

        assert rig.decode.stats()[2].failures == {"NotAuthenticatedError": 2}
        ended = rig.prefill_workers[0].stats()[1].ended
        assert {reason: n for reason, n in ended.items() if n} == {ReleaseReason.REVOKED: 2}


async def test_a_call_that_is_cut_short_after_the_hand_off_costs_nothing():
    expected, _, _ = await tokens_by("worker")
    assert await tokens_by("cut") == (expected, {}, 0)


async def test_a_replayed_call_is_refused_and_leaves_the_first_one_alone():
    """While the hand-off runs, and for the minute in which its end is remembered."""
    async with worker_rig() as rig:
        entrance = PrefillDoor(rig.prefill_workers[0].prefill, gate=CallGate(SECRET))
        request = replace(REQUEST, decode=rig.side.info, sampling=SamplingParams(max_tokens=4))
        body = msgspec.msgpack.encode(request)

        def calling() -> SealedCall:
            """The same bytes each time."""
            return SealedCall(SECRET, Purpose.PREFILL_CALL, body, random_bytes=bytes)

        async def replay() -> str:
            """What the one answer to it says."""
            call = calling()
            (answer,) = await all_of(entrance.prefill(call.message))
            _, event = msgspec.msgpack.decode(call.open(answer))
            message: str = event["message"]
            return message

        first = calling()
        hearing = entrance.prefill(first.message)
        kind, _ = msgspec.msgpack.decode(first.open(await anext(hearing)))
        assert kind == 0

        assert await replay() == "epoch 1 of transfer transfer-0 is not above 1"
        assert rig.prefill_workers[0].stats()[1].active_leases == 1
        await hearing.aclose()
        await rig.settled()
        assert await replay() == "epoch 1 of transfer transfer-0 is not above 1"
        await rig.settled()
        assert rig.prefill_workers[0].stats()[1].opened == 1
