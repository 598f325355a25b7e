"""Serve handles behind the Protocols that the layers below know.

The only place where an exception of Ray becomes one of ours, and where a caller that stops
iterating is turned into a cancelled call on the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeVar

from grpc import RpcError
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.control_call import CONTROL, ControlCall
from deployments.prefill_call import PrefillCall
from kv_transfer.authentication import Secret
from kv_transfer.transport import PeerLostError
from workers.messages import PrefillEvent, PrefillRequest

AnswerT = TypeVar("AnswerT")

_BYTES: Mapping[str, Any] = MappingProxyType(
    {
        # Of bytes: the C pickler does, where Serve's default goes through Python.
        "request_serialization": "pickle",
        # Whoever answers, Serve unpickles nothing of it here.
        "response_serialization": "noop",
        # Over Serve's gRPC, whatever a variable says: else Ray pickles both.
        "_by_reference": False,
    }
)
"""How a method is called that takes bytes and answers with bytes."""
_LOST = (RayError, RayServeException, RpcError, RuntimeError, TypeError, ValueError)
"""What Serve raises of a call that fails. gRPC's stands for any exception on the replica, which has
no form in plain bytes; the last three are Serve's where what answers is no replica of Serve."""


async def stream_call(
    handle: DeploymentHandle, method: str, message: bytes
) -> AsyncGenerator[object, None]:
    """Items of a method that streams bytes; closing the iterator cancels it on the replica.

    A call that fails, for whatever reason, is a `PeerLostError`.
    """
    streaming = handle.options(stream=True, **_BYTES)
    response = getattr(streaming, method).remote(message)
    items = aiter(response)
    finished = False
    try:
        while True:
            try:
                item = await anext(items)
            except StopAsyncIteration:
                finished = True
                return
            except _LOST as error:
                raise PeerLostError(f"the worker was lost: {type(error).__name__}") from error
            yield item
    finally:
        if not finished:
            response.cancel()


class PrefillPool:
    """The prefill deployment as a decode worker's `PrefillService`."""

    def __init__(self, handle: DeploymentHandle, *, secret: Secret) -> None:
        self._handle = handle
        self._secret = secret

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        """See `PrefillWorker.prefill`; a replica that dies is a `PeerLostError`.

        An answer of somebody who does not know the secret, or that is not the next one to this
        call, is a `NotAuthenticatedError`.
        """
        call = PrefillCall(self._secret, request)
        answers = stream_call(self._handle, "prefill", call.message)
        async with aclosing(answers):
            async for answer in answers:
                yield call.open(answer)


async def ask_all(
    handle: DeploymentHandle, call: ControlCall[AnswerT], *, timeout_s: float
) -> dict[str, AnswerT]:
    """What every live replica says that knows the secret, by its process, in time."""
    return call.open_all(await call_all(handle, CONTROL, call.message, timeout_s=timeout_s))


async def call_all(
    handle: DeploymentHandle,
    method: str,
    message: bytes,
    *,
    timeout_s: float,
    suffices: Callable[[Sequence[object]], bool] = lambda _: False,
) -> list[object]:
    """What every live replica answers in bytes, without those that fail or are late.

    Others are not waited for once the answers so far suffice.
    """
    # Serve's own way of waiting gives nothing if one replica is late: one that hangs would hide
    # all others.
    answers = handle.options(**_BYTES).broadcast(method, message)
    try:
        async with asyncio.timeout(timeout_s):
            replies = await answers._fetch_replica_results_async()
    except (TimeoutError, RayError, RayServeException):
        return []
    calls = [asyncio.ensure_future(reply.get_async()) for reply in replies]
    waiting = set(calls)
    heard: list[object] = []
    late_at = time.monotonic() + timeout_s
    try:
        while waiting and not suffices(heard) and (left_s := late_at - time.monotonic()) > 0:
            _, waiting = await asyncio.wait(
                waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            heard = [asked.result() for asked in calls if _is_answered(asked)]
        return heard
    finally:
        for asked in waiting:
            asked.cancel()


def _is_answered(asked: asyncio.Future[Any]) -> bool:
    """Whether a replica is done with a call, and has not failed."""
    return asked.done() and not asked.cancelled() and asked.exception() is None
