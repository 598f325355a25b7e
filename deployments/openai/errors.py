"""What goes wrong, as HTTP statuses and OpenAI error bodies: the one table of them.

    ApiError                       has its row in the table, or states its own code
    +-- InvalidRequestError        400, names the parameter
    +-- UnknownModelError          404
    +-- UnknownPathError           404
    +-- MethodNotAllowedError      405
    +-- BodyTooLargeError          413
    +-- UnsupportedMediaTypeError  415
    +-- NotReadyError              503
    +-- GenerationFailedError      by its `FailureCode`

Any other exception is an internal error; its text stays in the log of the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    QueueFullError,
    WorkerStoppingError,
)
from workers.messages import Failed, FailureCode

__all__ = [
    "ApiError",
    "BodyTooLargeError",
    "ErrorReply",
    "GenerationFailedError",
    "InvalidRequestError",
    "MethodNotAllowedError",
    "NotReadyError",
    "UnknownModelError",
    "UnknownPathError",
    "UnsupportedMediaTypeError",
    "error_reply",
]


class ApiError(Exception):
    """A request is answered with an error; the message is written for the client."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequestError(ApiError):
    """The body, a header or a parameter is not what the API takes."""


class UnknownModelError(ApiError):
    """No model of that name is served."""


class UnknownPathError(ApiError):
    """Nothing is served at that path."""


class MethodNotAllowedError(ApiError):
    """The path takes other methods."""


class BodyTooLargeError(ApiError):
    """The body is longer than the limit."""


class UnsupportedMediaTypeError(ApiError):
    """The body is not declared as JSON."""


class NotReadyError(ApiError):
    """No worker could serve a request now."""


class GenerationFailedError(ApiError):
    """A sequence did not finish."""

    def __init__(
        self, failure: FailureCode, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.failure = failure

    @classmethod
    def from_event(cls, event: Failed) -> GenerationFailedError:
        """The failure that a worker reported."""
        return cls(event.code, event.message, retry_after_s=event.retry_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """One error as the client gets it: a status with a body, or the last event of a stream."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    status: int
    type: str
    code: str | None = None
    message: str | None = None
    """Replaces the exception's: for failures whose text was not written for clients."""
    retry_after_s: float | None = None
    """Sent where the error names no time itself."""


_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"

_INTERNAL = _Row(
    status=500,
    type="server_error",
    code=FailureCode.INTERNAL.value,
    message="The server failed to answer this request; its log has the reason.",
)
_CONTEXT = _Row(status=400, type=_INVALID, code=FailureCode.CONTEXT_LENGTH_EXCEEDED.value)
_QUEUE = _Row(
    status=429, type="rate_limit_error", code=FailureCode.QUEUE_FULL.value, retry_after_s=1.0
)
_DEADLINE = _Row(
    status=504,
    type="timeout_error",
    code=FailureCode.DEADLINE_EXCEEDED.value,
    message="The request's deadline passed before it finished.",
)
_LOST = _Row(
    status=503,
    type=_UNAVAILABLE,
    code=FailureCode.WORKER_LOST.value,
    message="The worker that served this request was lost.",
    retry_after_s=1.0,
)
_STOPPING = _Row(
    status=503,
    type=_UNAVAILABLE,
    code=FailureCode.WORKER_STOPPING.value,
    message="The worker takes no new requests now.",
    retry_after_s=1.0,
)

_TABLE: Mapping[type[Exception] | FailureCode, _Row] = MappingProxyType(
    {
        InvalidRequestError: _Row(status=400, type=_INVALID),
        UnknownModelError: _Row(status=404, type=_INVALID, code="model_not_found"),
        UnknownPathError: _Row(status=404, type=_INVALID, code="not_found"),
        MethodNotAllowedError: _Row(status=405, type=_INVALID, code="method_not_allowed"),
        BodyTooLargeError: _Row(status=413, type=_INVALID, code="body_too_large"),
        UnsupportedMediaTypeError: _Row(status=415, type=_INVALID, code="unsupported_media_type"),
        NotReadyError: _Row(status=503, type=_UNAVAILABLE, code="not_ready", retry_after_s=1.0),
        FailureCode.CONTEXT_LENGTH_EXCEEDED: _CONTEXT,
        FailureCode.QUEUE_FULL: _QUEUE,
        FailureCode.DEADLINE_EXCEEDED: _DEADLINE,
        FailureCode.WORKER_LOST: _LOST,
        FailureCode.WORKER_STOPPING: _STOPPING,
        FailureCode.INTERNAL: _INTERNAL,
        ContextOverflowError: _CONTEXT,
        QueueFullError: _QUEUE,
        DeadlineExceededError: _DEADLINE,
        WorkerStoppingError: _STOPPING,
    }
)


def error_reply(error: Exception) -> ErrorReply:
    """The answer to a request that ended with this exception."""
    row = _row(error)
    api_error = error if isinstance(error, ApiError) else ApiError(str(error))
    body = {
        "error": {
            "message": row.message or api_error.message,
            "type": row.type,
            "param": api_error.param,
            "code": api_error.code or row.code,
        }
    }
    retry_after_s = api_error.retry_after_s or row.retry_after_s
    headers = {} if retry_after_s is None else {"retry-after": _whole_seconds(retry_after_s)}
    return ErrorReply(status=row.status, body=body, headers=headers)


def _row(error: Exception) -> _Row:
    if isinstance(error, GenerationFailedError):
        return _TABLE[error.failure]
    return _TABLE.get(type(error), _INTERNAL)


def _whole_seconds(seconds: float) -> str:
    """Retry-After takes whole seconds; rounded up, so that no client comes too early."""
    return str(max(1, math.ceil(seconds)))
