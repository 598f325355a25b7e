"""Serve handles behind the Protocols that the layers below know.

The only place where an exception of Ray becomes one of ours, and where a caller that stops
iterating is turned into a cancelled call on the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kv_transfer.transport import PeerLostError
from workers.messages import (
    Failed,
    FailureCode,
    GenerateRequest,
    PrefillEvent,
    PrefillRequest,
    WorkerEvent,
)

_ASK_TIMEOUT_S = 2.0
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


class DecodePool:
    """The decode deployment as the `WorkerPool` of Front's backend."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def is_ready(self) -> bool:
        """Whether a decode worker takes requests; without prefill workers it computes prompts."""
        return any(await ask_all(self._handle, "is_ready", timeout_s=_ASK_TIMEOUT_S))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """See `DecodeWorker.generate`; a replica that dies is a `Failed` with WORKER_LOST."""
        events = stream_call(self._handle, "generate", request)
        try:
            async for event in events:
                yield event
        except (RayError, RayServeException) as error:
            yield Failed(
                attempt=request.attempt,
                code=FailureCode.WORKER_LOST,
                message=f"the decode worker was lost ({type(error).__name__})",
            )
        finally:
            await events.aclose()


async def ask_all(handle: DeploymentHandle, method: str, *, timeout_s: float) -> list[Any]:
    """Answers of every live replica; those that fail are left out, and all if one is late."""
    answers = handle.broadcast(method)
    try:
        results = await answers.results_async(timeout_s=timeout_s, return_exceptions=True)
    except (TimeoutError, RayError, RayServeException):
        return []
    return [result for result in results if not isinstance(result, BaseException)]
