"""The error table: every failure has a status, and no text that is not for clients leaves."""

from __future__ import annotations

import pytest

from deployments.openai.errors import (
    ApiError,
    BodyTooLargeError,
    GenerationFailedError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    UnknownModelError,
    UnknownPathError,
    UnsupportedMediaTypeError,
    error_reply,
)
from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    PoolTooSmallError,
    QueueFullError,
    WorkerStoppingError,
)
from workers.messages import Failed, FailureCode

SECRET = "my secret prompt"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("m", param="p"), 400, None),
        (InvalidRequestError("m", code="unsupported_parameter"), 400, "unsupported_parameter"),
        (UnknownModelError("m"), 404, "model_not_found"),
        (UnknownPathError("m"), 404, "not_found"),
        (MethodNotAllowedError("m"), 405, "method_not_allowed"),
        (BodyTooLargeError("m"), 413, "body_too_large"),
        (UnsupportedMediaTypeError("m"), 415, "unsupported_media_type"),
        (NotReadyError("m"), 503, "not_ready"),
        (ContextOverflowError("m"), 400, "context_length_exceeded"),
        (QueueFullError("m"), 429, "queue_full"),
        (DeadlineExceededError("m"), 504, "deadline_exceeded"),
        (WorkerStoppingError("m"), 503, "worker_stopping"),
        (PoolTooSmallError("m"), 500, "internal"),
        (ApiError("m"), 500, "internal"),
        (KeyError("m"), 500, "internal"),
    ],
)
def test_every_exception_has_a_status(error, status, code):
    reply = error_reply(error)
    assert reply.status == status
    assert set(reply.body) == {"error"}
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["code"] == code
    assert reply.body["error"]["message"]
    assert reply.body["error"]["param"] == getattr(error, "param", None)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (FailureCode.CONTEXT_LENGTH_EXCEEDED, 400),
        (FailureCode.QUEUE_FULL, 429),
        (FailureCode.DEADLINE_EXCEEDED, 504),
        (FailureCode.WORKER_LOST, 503),
        (FailureCode.WORKER_STOPPING, 503),
        (FailureCode.INTERNAL, 500),
    ],
)
def test_every_failure_of_a_worker_has_a_status(code, status):
    failed = Failed(attempt=0, code=code, message="m")
    reply = error_reply(GenerationFailedError.from_event(failed))
    assert (reply.status, reply.body["error"]["code"]) == (status, code.value)


def test_the_table_covers_all_failure_codes():
    for code in FailureCode:
        assert error_reply(GenerationFailedError(code, "m")).body["error"]["code"] == code.value


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        GenerationFailedError(FailureCode.INTERNAL, SECRET),
        GenerationFailedError(FailureCode.WORKER_LOST, SECRET),
    ],
)
def test_text_that_was_not_written_for_clients_stays_here(error):
    assert SECRET not in str(error_reply(error).body)


@pytest.mark.parametrize(
    ("given", "sent"), [(None, "1"), (0.2, "1"), (1.2, "2"), (30.0, "30"), (0.0, "1")]
)
def test_a_full_queue_says_when_to_come_back(given, sent):
    error = GenerationFailedError(FailureCode.QUEUE_FULL, "full", retry_after_s=given)
    assert error_reply(error).headers == {"retry-after": sent}


def test_an_error_that_waiting_does_not_cure_names_no_time():
    assert error_reply(InvalidRequestError("m")).headers == {}
