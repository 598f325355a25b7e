"""Asking every replica: who fails or is late is left out, and hides nobody else's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError

from deployments.handles import ask_all

Reply = Callable[[], Awaitable[object]]


class FakeReply:
    """One replica's result, as `DeploymentBroadcastResponse` keeps it."""

    def __init__(self, answer: Reply) -> None:
        self.get_async = answer


class FakeBroadcast:
    """Serve's `DeploymentBroadcastResponse`, as far as `ask_all` uses it."""

    def __init__(self, replies: list[Reply] | Exception) -> None:
        self._replies = replies

    async def _fetch_replica_results_async(self) -> list[FakeReply]:
        if isinstance(self._replies, Exception):
            raise self._replies
        return [FakeReply(reply) for reply in self._replies]


class FakeHandle:
    """Serve's `DeploymentHandle`, as far as `ask_all` uses it."""

    def __init__(self, replies: list[Reply] | Exception) -> None:
        self._replies = replies
        self.asked: list[str] = []

    def broadcast(self, method: str) -> FakeBroadcast:
        self.asked.append(method)
        return FakeBroadcast(self._replies)


async def one() -> int:
    return 1


async def two() -> int:
    return 2


async def dead() -> int:
    raise RayError


async def hanging() -> int:
    await asyncio.Event().wait()
    return 3


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
