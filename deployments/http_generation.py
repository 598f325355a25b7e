"""POST of the two generation endpoints: read, prepare, run, and write a body or a stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request

from deployments.front_service import Endpoint, FrontService, Generation
from deployments.http_boundary import (
    ClientGoneError,
    Exchange,
    Receive,
    Reply,
    Scope,
    Send,
    StreamFailedError,
    exchange_of,
)
from deployments.openai.body import decode_object
from deployments.openai.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    UnsupportedMediaTypeError,
)
from deployments.openai.stream import (
    KEEP_ALIVE,
    ChatDialect,
    CompletionDialect,
    Dialect,
    StreamEncoder,
    collect,
)
from deployments.pipeline import Run

__all__ = ["GenerationEndpoint"]

_TIMEOUT_HEADER = "x-request-timeout-seconds"
_CUT_MARGIN_S = 0.25
"""Serve cuts a connection at the deadline; an error event must be through before."""
_STALLED_S = 10.0
"""A client that reads nothing for so long after the deadline is gone."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationEndpoint:
    """An ASGI application for one of the two paths."""

    def __init__(self, front: FrontService, endpoint: Endpoint) -> None:
        self._front = front
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that leaves ends its run."""
        exchange = exchange_of(scope)
        request = Request(scope, receive)
        settings = self._front.settings
        timeout_s = _timeout_s(request, settings.request_timeout_s)
        body = decode_object(await _read_body(request, settings.max_body_bytes))
        generation = await self._front.prepare(
            self._endpoint,
            body,
            request_id=exchange.request_id,
            arrived_at=exchange.arrived_at,
            timeout_s=timeout_s,
        )
        answer = self._answer(generation, scope, receive, send)
        await _until_gone(answer, receive, exchange, limit_s=timeout_s + _STALLED_S)

    async def _answer(
        self, generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        dialect = self._dialect(generation)
        async with self._front.start(generation) as run:
            if generation.is_stream:
                await self._stream(generation, run, dialect, send)
                return
            deltas = []
            while not run.is_done:
                deltas += await run.receive()
            await Reply(collect(dialect, deltas, run.usage))(scope, receive, send)

    async def _stream(self, generation: Generation, run: Run, dialect: Dialect, send: Send) -> None:
        """Write the run as events.

        The headers go out with the first token or after `keep_alive_s`, whichever is first: until
        then a failure gets its real status, from then on it is an error event.
        """
        encoder = StreamEncoder(
            dialect,
            prompt_tokens=run.prompt_tokens,
            include_usage=generation.include_usage,
            continuous_usage=generation.continuous_usage,
        )
        deltas = await run.receive(self._front.settings.keep_alive_s)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            first = b"".join(map(encoder.delta, deltas)) or KEEP_ALIVE
            await _write(send, first)
            await self._stream_rest(run, encoder, send)
        except ClientGoneError:
            raise
        except Exception as error:
            await _write(send, encoder.error(error), is_last=True)
            raise StreamFailedError(error) from error
        await _write(send, encoder.done(run.usage), is_last=True)

    async def _stream_rest(self, run: Run, encoder: StreamEncoder, send: Send) -> None:
        """Write deltas as they come, and a comment whenever nothing else was due for a while."""
        clock, keep_alive_s = self._front.clock, self._front.settings.keep_alive_s
        quiet_until = clock() + keep_alive_s
        while not run.is_done:
            deltas = await run.receive(max(0.0, quiet_until - clock()))
            events = b"".join(map(encoder.delta, deltas))
            if not events and clock() >= quiet_until:
                events = KEEP_ALIVE
            if events:
                await _write(send, events)
                quiet_until = clock() + keep_alive_s

    def _dialect(self, generation: Generation) -> Dialect:
        is_chat = self._endpoint == "chat_completions"
        dialect = ChatDialect if is_chat else CompletionDialect
        return dialect(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{generation.request_id}",
            created=int(self._front.wall_clock()),
            model=generation.model,
            has_logprobs=generation.has_logprobs,
            has_token_ids=generation.has_token_ids,
        )


async def _write(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _timeout_s(request: Request, limit_s: float) -> float:
    """Seconds that the request may take, from its arrival."""
    given = request.headers.get(_TIMEOUT_HEADER)
    try:
        timeout_s = limit_s if given is None else float(given)
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InvalidRequestError("must be a positive number of seconds", param=_TIMEOUT_HEADER)
    timeout_s = min(timeout_s, limit_s)
    return timeout_s - min(_CUT_MARGIN_S, timeout_s / 10)


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    """The body of a JSON request, never more of it than the limit."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError("the content type must be application/json")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() else 0
    chunks: list[bytes] = []
    try:
        if size <= limit_bytes:
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit_bytes:
                    break
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    if size > limit_bytes:
        raise BodyTooLargeError(f"the body is longer than {limit_bytes} bytes")
    return b"".join(chunks)


async def _until_gone(
    answer: Coroutine[Any, Any, None], receive: Receive, exchange: Exchange, *, limit_s: float
) -> None:
    """Run the answer to its end, or cancel it when the client has left or reads no more."""
    work = asyncio.create_task(answer)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((work, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if exchange.is_whole:  # nobody left early: let the run close its calls in its own time
            await asyncio.wait((work,))
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait((work, gone))
    if work.cancelled():
        raise ClientGoneError
    work.result()


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left; the body has been read, so nothing else is to come."""
    while (await receive())["type"] != "http.disconnect":
        pass
