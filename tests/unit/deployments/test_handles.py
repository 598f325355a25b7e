"""Asking every replica: who fails or is late is left out, and hides nobody else's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ray.exceptions import RayError

from deployments.call_gate import CallGate
from deployments.channel.address import ChannelAddress
from deployments.control_call import CHANNEL_ADDRESS, ControlCall, ControlDoor
from deployments.handles import ask_all, call_all
from kv_transfer.sealing import REFUSAL
from tests.fakes.control_call import GullibleGate, unsealed
from tests.fakes.handle import FakeHandle, Reply, hanging
from tests.fakes.prefill_call import OTHER_SECRET, SECRET


async def one(message: bytes) -> bytes:
    return message + b"1"


async def two(message: bytes) -> bytes:
    return message + b"2"


async def dead(_: bytes) -> bytes:
    raise RayError


def address_of(worker: str) -> ChannelAddress:
    return ChannelAddress(worker=worker, host="127.0.0.1", port=1)


def decode(worker: str, gate: CallGate | None = None) -> Reply:
    """A decode worker behind a gate, or one that knows the secret."""
    address = address_of(worker)
    return ControlDoor(gate or CallGate(SECRET), {CHANNEL_ADDRESS: lambda: address}).answer


async def test_every_replica_s_answer_comes_back():
    handle = FakeHandle([one, two])
    assert await call_all(handle, "method", b"x", timeout_s=30) == [b"x1", b"x2"]
    assert handle.asked == ["method"]


async def test_what_an_answer_is_made_of_is_not_unpickled():
    handle = FakeHandle([one])
    await call_all(handle, "method", b"x", timeout_s=30)
    assert handle.serializations == ["noop"]


async def test_a_replica_that_fails_or_hangs_hides_nobody_else():
    handle = FakeHandle([dead, one, hanging, two])
    assert await call_all(handle, "x", b"x", timeout_s=0.01) == [b"x1", b"x2"]


async def test_nobody_waits_for_more_answers_than_suffice():
    async def first(message: bytes) -> bytes:
        return message

    def has_one(heard: Sequence[object]) -> bool:
        return len(heard) == 1

    handle = FakeHandle([hanging, first, hanging])
    async with asyncio.timeout(10):
        assert await call_all(handle, "x", b"x", timeout_s=60, suffices=has_one) == [b"x"]


async def test_a_pool_without_replicas_answers_nothing():
    assert await call_all(FakeHandle([]), "x", b"", timeout_s=30) == []
    assert await call_all(FakeHandle(RayError()), "x", b"", timeout_s=30) == []


async def test_who_does_not_know_the_secret_is_as_if_silent_and_hides_nobody():
    """Of who refuses, repeats what it is sent, and answers as a worker does: under another secret,
    or under none."""

    async def refusing(_: bytes) -> bytes:
        return REFUSAL

    other, gullible = decode("c", CallGate(OTHER_SECRET)), decode("d", GullibleGate())
    plain = unsealed(address_of("e"))
    replicas = [other, gullible, decode("a"), refusing, one, plain, decode("b")]
    call = ControlCall(SECRET, CHANNEL_ADDRESS)

    said = await ask_all(FakeHandle(replicas), call, timeout_s=30)

    assert [address.worker for address in said.values()] == ["a", "b"]


async def test_who_stops_asking_leaves_nobody_asked():
    """A scrape whose client has left must not keep a call to each replica that hangs."""
    begun, cut = asyncio.Event(), asyncio.Event()

    async def hang(_: bytes) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
        return b""

    asking = asyncio.create_task(call_all(FakeHandle([hang]), "x", b"", timeout_s=30))
    async with asyncio.timeout(10):
        await begun.wait()
        asking.cancel()
        await cut.wait()
