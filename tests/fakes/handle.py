"""A Serve handle whose replicas answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

__all__ = ["FakeHandle", "Reply", "hanging"]

Reply = Callable[[], Awaitable[object]]


async def hanging() -> object:
    """The answer of a replica that gives none."""
    return await asyncio.Event().wait()


class FakeReply:
    """One replica's result, as `DeploymentBroadcastResponse` keeps it."""

    def __init__(self, answer: Reply) -> None:
        self.get_async = answer


class FakeBroadcast:
    """Serve's `DeploymentBroadcastResponse`, as far as `ask_all` uses it."""

    def __init__(self, replies: Sequence[Reply] | Exception) -> None:
        self._replies = replies

    async def _fetch_replica_results_async(self) -> list[FakeReply]:
        if isinstance(self._replies, Exception):
            raise self._replies
        return [FakeReply(reply) for reply in self._replies]


class FakeHandle:
    """Serve's `DeploymentHandle`, as far as `ask_all` uses it."""

    def __init__(self, replies: Sequence[Reply] | Exception) -> None:
        self.replies = replies
        """Of each replica, or why none is asked."""
        self.asked: list[str] = []
        """The method of each call."""

    def broadcast(self, method: str) -> FakeBroadcast:
        """See `DeploymentHandle.broadcast`."""
        self.asked.append(method)
        return FakeBroadcast(self.replies)
