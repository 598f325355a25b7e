"""What is around every HTTP request: its id, its count, and the one place where exceptions end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from deployments.front_service import FrontService
from deployments.openai.errors import ApiError, GenerationFailedError, error_reply
from deployments.openai.stream import to_json

__all__ = [
    "AsgiApp",
    "Boundary",
    "ClientGoneError",
    "Exchange",
    "Message",
    "Receive",
    "Reply",
    "Scope",
    "Send",
    "StreamFailedError",
    "exchange_of",
]

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_EXCHANGE = "baton.exchange"
_ID_HEADER = b"x-request-id"
_ID_CHARACTERS = 128
_ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat_completions"}
"""Label values of the metrics; every other path is `other`."""


class ClientGoneError(Exception):
    """The client left before its answer was whole; nobody is there to be told."""


class StreamFailedError(Exception):
    """The answer ended in an error event; the reason is for the log."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(type(reason).__name__)
        self.reason = reason


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and how far its answer has come."""

    request_id: str
    arrived_at: float
    status: int | None = None
    """Of the answer, once it has begun."""
    is_whole: bool = False
    """Whether all of the answer is sent; a server then says that the client has left, too."""


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that a request inside the boundary belongs to."""
    exchange: Exchange = scope[_EXCHANGE]
    return exchange


class Reply:
    """A whole answer: an ASGI application that sends it."""

    def __init__(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._body = body if isinstance(body, bytes) else to_json(body)
        self._status = status
        self._headers = {
            "content-type": content_type,
            "content-length": str(len(self._body)),
            **(headers or {}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})

    @classmethod
    def of_error(cls, error: Exception, headers: Mapping[str, str] | None = None) -> Reply:
        """The answer to a request that ended with an exception."""
        reply = error_reply(error)
        return cls(reply.body, status=reply.status, headers={**(headers or {}), **reply.headers})


class Boundary:
    """ASGI middleware: nothing but a cancellation passes it."""

    def __init__(self, app: AsgiApp, front: FrontService) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass on what is no HTTP request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, clock = self._front.metrics, self._front.clock
        exchange = Exchange(request_id=self._request_id(scope), arrived_at=clock())
        scope[_EXCHANGE] = exchange
        endpoint = _ENDPOINTS.get(scope["path"], "other")
        outcome = "disconnected"  # what a cancellation means
        metrics.request_started(endpoint)
        try:
            noting = _noting(send, exchange, echo=self._front.settings.echoes_request_id)
            outcome = await self._serve(scope, receive, noting, exchange)
        finally:
            metrics.request_ended(endpoint, outcome)
            logger.info(
                "request ended request_id=%s endpoint=%s status=%s outcome=%s seconds=%.3f",
                exchange.request_id,
                endpoint,
                exchange.status,
                outcome,
                clock() - exchange.arrived_at,
            )

    async def _serve(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> str:
        """Run the application and see to an answer; returns the outcome's label."""
        try:
            error = await self._run(scope, receive, send)
            if error is not None:
                _log_failure(exchange, error)
                if exchange.status is not None:
                    return "stream_error"
                await Reply.of_error(error)(scope, receive, send)
        except ClientGoneError:
            return "disconnected"
        return f"{(exchange.status or 500) // 100}xx"

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> Exception | None:
        """Run the application; returns what it failed with."""
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            raise
        except StreamFailedError as failed:
            return failed.reason
        except Exception as error:  # noqa: BLE001 - the boundary: logged, and the client answered
            return error
        return None

    def _request_id(self, scope: Scope) -> str:
        """The client's own id without what does not belong into a header or a log, or a new one."""
        given = next((value for name, value in scope["headers"] if name == _ID_HEADER), b"")
        allowed = bytes(byte for byte in given if 0x21 <= byte <= 0x7E)
        return allowed[:_ID_CHARACTERS].decode("ascii") or self._front.new_request_id()


def _noting(send: Send, exchange: Exchange, *, echo: bool) -> Send:
    """Send, noting when the answer begins and is whole; with `echo`, the id is in its headers."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            request_id = (_ID_HEADER, exchange.request_id.encode("ascii"))
            if echo:
                message = {**message, "headers": [*message["headers"], request_id]}
        try:
            await send(message)
        except OSError as error:
            raise ClientGoneError from error
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            exchange.is_whole = True

    return noting


def _log_failure(exchange: Exchange, error: Exception) -> None:
    """One line: what a worker said, the trace of a bug, or only the kind of a client's mistake."""
    is_failure = isinstance(error, GenerationFailedError)
    is_bug = not isinstance(error, ApiError)
    logger.log(
        logging.ERROR if is_bug else logging.WARNING if is_failure else logging.INFO,
        "request failed request_id=%s error=%s reason=%s",
        exchange.request_id,
        type(error).__name__,
        error if is_failure else "-",
        exc_info=error if is_bug else None,
    )
