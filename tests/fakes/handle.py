"""A Serve handle whose replicas answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

__all__ = ["FakeHandle", "Reply", "hanging"]

Reply = Callable[[bytes], Awaitable[object]]


async def hanging(_: bytes) -> object:
    """The answer of a replica that gives none."""
    return await asyncio.Event().wait()


class FakeReply:
    """One replica's result, as `DeploymentBroadcastResponse` keeps it."""

    def __init__(self, answer: Callable[[], Awaitable[object]]) -> None:
        self.get_async = answer


class FakeBroadcast:
    """Serve's `DeploymentBroadcastResponse`, as far as `call_all` uses it."""

    def __init__(self, replies: Sequence[Reply] | Exception, message: bytes) -> None:
        self._replies = replies
        self._message = message

    async def _fetch_replica_results_async(self) -> list[FakeReply]:
        if isinstance(self._replies, Exception):
            raise self._replies
        return [FakeReply(partial(reply, self._message)) for reply in self._replies]


class FakeHandle:
    """Serve's `DeploymentHandle`, as far as `call_all` uses it."""

    def __init__(self, replies: Sequence[Reply] | Exception) -> None:
        self.replies = replies
        """Of each replica, or why none is asked."""
        self.asked: list[str] = []
        """The method of each call."""
        self.serializations: list[str] = []

    def options(self, **options: Any) -> FakeHandle:
        """See `DeploymentHandle.options`."""
        assert not options["_by_reference"], "else Serve takes no heed of the others"
        self.serializations.append(options["response_serialization"])
        return self

    def broadcast(self, method: str, message: bytes) -> FakeBroadcast:
        """See `DeploymentHandle.broadcast`."""
        self.asked.append(method)
        return FakeBroadcast(self.replies, message)
