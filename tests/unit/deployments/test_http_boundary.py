"""Around an application that misbehaves: the client gets one answer, the log one line."""

from __future__ import annotations

import logging

import httpx
import pytest

from deployments.http_boundary import Boundary, Reply
from deployments.openai.errors import GenerationFailedError, InvalidRequestError
from tests.fakes.backend import tokens_then_end
from tests.fakes.front import make_codec, make_front
from workers.messages import FailureCode


@pytest.fixture(scope="module")
def front():
    return make_front(tokens_then_end([5]), codec=make_codec())[0]


async def answer_of(front, app) -> httpx.Response:
    transport = httpx.ASGITransport(Boundary(app, front))
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        return await client.get("/x")


async def test_an_exception_before_the_answer_becomes_the_answer(front, caplog):
    async def app(scope, receive, send):
        raise KeyError("inner text")

    response = await answer_of(front, app)
    assert response.status_code == 500
    assert "inner text" not in response.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None


async def test_an_exception_after_the_answer_has_begun_changes_nothing(front, caplog):
    async def app(scope, receive, send):
        await Reply({"a": 1}, headers={"x-own": "1"})(scope, receive, send)
        raise KeyError

    response = await answer_of(front, app)
    assert (response.status_code, response.json()) == (200, {"a": 1})
    assert response.headers["x-own"] == "1"
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1


@pytest.mark.parametrize(
    ("error", "level", "is_told"),
    [
        (InvalidRequestError("the client's words"), logging.INFO, False),
        (GenerationFailedError(FailureCode.INTERNAL, "the worker's words"), logging.WARNING, True),
    ],
)
async def test_the_log_has_what_a_worker_said_and_not_what_a_client_sent(
    front, caplog, error, level, is_told
):
    async def app(scope, receive, send):
        raise error

    caplog.set_level(logging.INFO)
    response = await answer_of(front, app)
    (line,) = [r for r in caplog.records if "request failed" in r.getMessage()]
    assert line.levelno == level
    assert ("words" in line.getMessage()) == is_told
    assert response.headers["x-request-id"] in line.getMessage()


async def test_each_request_leaves_one_line_with_its_end(front, caplog):
    caplog.set_level(logging.INFO)
    response = await answer_of(front, Reply({"a": 1}))
    (line,) = [r.getMessage() for r in caplog.records if "request ended" in r.getMessage()]
    assert f"request_id={response.headers['x-request-id']}" in line
    assert "status=200" in line
