"""Serve handles behind the Protocols that the layers below know.

The only place where an exception of Ray becomes one of ours, and where a caller that stops
iterating is turned into a cancelled call on the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kv_transfer.transport import PeerLostError
from workers.messages import PrefillEvent, PrefillRequest

_PLAIN_PICKLE = "pickle"
"""Our messages are plain values: the C pickler does, where Serve's default goes through Python."""


async def stream_call(
    handle: DeploymentHandle, method: str, request: object
) -> AsyncGenerator[Any, None]:
    """Items of a streaming method; closing the iterator cancels the call on the replica."""
    streaming = handle.options(
        stream=True, request_serialization=_PLAIN_PICKLE, response_serialization=_PLAIN_PICKLE
    )
    response = getattr(streaming, method).remote(request)
    finished = False
    try:
        async for item in response:
            yield item
        finished = True
    finally:
        if not finished:
            response.cancel()


class PrefillPool:
    """The prefill deployment as a decode worker's `PrefillService`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        """See `PrefillWorker.prefill`; a replica that dies is a `PeerLostError`."""
        answers = stream_call(self._handle, "prefill", request)
        try:
            async for answer in answers:
                yield answer
        except (RayError, RayServeException) as error:
            raise PeerLostError(f"the prefill worker was lost: {type(error).__name__}") from error
        finally:
            await answers.aclose()


async def ask_all(handle: DeploymentHandle, method: str, *, timeout_s: float) -> list[Any]:
    """Answers of every live replica, without those that fail or are late."""
    # Serve's own way of waiting gives nothing if one replica is late: one that hangs would hide
    # all others.
    answers = handle.broadcast(method)
    try:
        async with asyncio.timeout(timeout_s):
            replies = await answers._fetch_replica_results_async()
    except (TimeoutError, RayError, RayServeException):
        return []
    waiting = [asyncio.ensure_future(reply.get_async()) for reply in replies]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        return [answer for asked in waiting if (answer := _answer_of(asked)) is not None]
    finally:
        for asked in waiting:
            asked.cancel()  # without effect on those that are done


def _answer_of(asked: asyncio.Future[Any]) -> Any:
    """What a replica has answered; None if it failed or has not."""
    is_answered = asked.done() and not asked.cancelled() and asked.exception() is None
    return asked.result() if is_answered else None
