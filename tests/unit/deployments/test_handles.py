"""Asking every replica: who fails or is late is left out, and hides nobody else's answer."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayError

from deployments.handles import ask_all
from tests.fakes.handle import FakeHandle, hanging


async def one() -> int:
    return 1


async def two() -> int:
    return 2


async def dead() -> int:
    raise RayError


async def test_every_replica_s_answer_comes_back():
    handle = FakeHandle([one, two])
    assert await ask_all(handle, "snapshot", timeout_s=30) == [1, 2]
    assert handle.asked == ["snapshot"]


async def test_a_replica_that_fails_or_hangs_hides_nobody_else():
    assert await ask_all(FakeHandle([dead, one, hanging, two]), "x", timeout_s=0.01) == [1, 2]


async def test_a_pool_without_replicas_answers_nothing():
    assert await ask_all(FakeHandle([]), "x", timeout_s=30) == []
    assert await ask_all(FakeHandle(RayError()), "x", timeout_s=30) == []


async def test_who_stops_asking_leaves_nobody_asked():
    """A scrape whose client has left must not keep a call to each replica that hangs."""
    begun, cut = asyncio.Event(), asyncio.Event()

    async def hang() -> int:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
        return 3

    asking = asyncio.create_task(ask_all(FakeHandle([hang]), "x", timeout_s=30))
    async with asyncio.timeout(10):
        await begun.wait()
        asking.cancel()
        await cut.wait()
