"""Streams and connections that end early: what is sent, when, and what is closed behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http_app import build_app
from deployments.http_boundary import Message
from tests.fakes.asgi import Connection
from tests.fakes.backend import Step, finished, frame, frames, tokens_then_end
from tests.fakes.front import MODEL, client_of, ids_of, make_codec, make_front
from workers.messages import Failed, FailureCode, FinishReason, GenerateRequest

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION = {"model": MODEL, "prompt": "hi"}
LOST = Failed(attempt=0, code=FailureCode.WORKER_LOST, message="the worker's own words")


@pytest.fixture(scope="module")
def codec():
    return make_codec()


def served(script: Callable[[GenerateRequest], Iterable[Step]], codec, **front_settings):
    front, backend = make_front(script, codec=codec, settings=front_settings)
    return front, build_app(front), backend


def events_of(body: str) -> list:
    """The data of each event; comments left out."""
    assert body.endswith("\n\n")
    lines = [line for line in body.split("\n\n")[:-1] if not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def outcome(front, endpoint: str) -> dict[str, float]:
    """How the requests of an endpoint have ended."""
    return {
        dict(item.labels)["outcome"]: item.value
        for item in front.metrics.snapshot().samples
        if item.name == "baton_requests_total" and dict(item.labels)["endpoint"] == endpoint
    }


# What is sent -----------------------------------------------------------------------------------


async def test_a_stream_that_succeeds_ends_in_exactly_one_done(codec):
    """Row 49."""
    token_ids = ids_of("hello world")
    front, _, _ = served(tokens_then_end(token_ids), codec)
    async with client_of(front) as client:
        for _ in range(50):
            body = (await client.post("/v1/chat/completions", json=CHAT)).text
            events = events_of(body)
            assert events.count("[DONE]") == 1
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_tokens_are_sent_as_they_come(codec):
    steps = [asyncio.Event(), asyncio.Event()]
    first, second = ids_of("a"), ids_of("b")

    def script(request: GenerateRequest) -> list[Step]:
        return [frame(*first), steps[0], frame(*second), steps[1], finished(request, 2)]

    _, app, _ = served(script, codec)
    async with Connection(app, "/v1/completions", {**COMPLETION, "stream": True}) as connection:
        start = await connection.message()
        assert start["status"] == 200
        assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
        assert '"text":"a"' in await connection.text_until('"a"')
        steps[0].set()
        await connection.text_until('"b"')
        steps[1].set()
        assert (await connection.rest()).endswith("data: [DONE]\n\n")


async def test_a_long_wait_is_filled_with_comments(codec):
    """Row 50, the other side: once the headers are out, a failure is an error event."""
    go = asyncio.Event()
    front, app, _ = served(lambda _: [go, LOST], codec, keep_alive_s=0.01)
    async with Connection(app, "/v1/chat/completions", CHAT) as connection:
        assert (await connection.message())["status"] == 200
        text = await connection.text_until(": keep-alive\n\n: keep-alive\n\n: keep-alive\n\n")
        assert "data:" not in text
        go.set()
        (event,) = events_of(await connection.rest())
    assert event["error"]["code"] == "worker_lost"
    assert outcome(front, "chat_completions") == {"stream_error": 1}


async def test_comments_also_fill_a_silence_between_tokens_and_held_back_text(codec):
    held, go = asyncio.Event(), asyncio.Event()

    def script(request: GenerateRequest) -> Iterable[Step]:
        yield frame(*ids_of("a"))
        yield held
        yield frame(*ids_of("E"))  # held back: it may begin the stop string
        yield go
        yield finished(request, 2)

    _, app, _ = served(script, codec, keep_alive_s=0.01)
    body = {**COMPLETION, "stream": True, "stop": "END"}
    async with Connection(app, "/v1/completions", body) as connection:
        await connection.message()
        await connection.text_until('"a"')
        held.set()
        await connection.text_until(": keep-alive\n\n: keep-alive\n\n")
        go.set()
        rest = events_of(await connection.rest())
    assert rest[0]["choices"][0]["text"] == "E"


@pytest.mark.parametrize("failure", [LOST, RuntimeError("secret"), None])
async def test_a_failure_after_content_is_an_error_event_without_done(codec, failure):
    """Rows 47, 48 and 50; None is a backend whose stream just ends."""
    token_ids = ids_of("abc")
    script = [*frames(token_ids), *([failure] if failure else [])]
    front, app, backend = served(lambda _: script, codec)
    async with Connection(app, "/v1/chat/completions", CHAT) as connection:
        assert (await connection.message())["status"] == 200
        body = await connection.rest()
    *chunks, last = events_of(body)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "abc"
    assert set(last) == {"error"}
    assert "[DONE]" not in body
    assert "secret" not in body
    assert "words" not in body
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert backend.num_open == 0
    assert outcome(front, "chat_completions") == {"stream_error": 1}


async def test_the_deadline_ends_a_stream_with_an_error_event(codec):
    token_ids = ids_of("a")
    _, app, backend = served(lambda _: [frame(*token_ids), asyncio.Event()], codec)
    headers = {"x-request-timeout-seconds": "0.2"}
    async with Connection(app, "/v1/chat/completions", CHAT, headers=headers) as connection:
        await connection.message()
        *_, last = events_of(await connection.rest())
    assert last["error"]["code"] == "deadline_exceeded"
    assert backend.num_open == 0


async def test_usage_comes_as_asked_for(codec):
    """Rows 56 and 57."""
    token_ids = ids_of("hello world")
    front, _, _ = served(tokens_then_end(token_ids), codec)
    async with client_of(front) as client:
        for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
            body = {**CHAT, "n": 2, "stream_options": options}
            events = events_of((await client.post("/v1/chat/completions", json=body)).text)[:-1]
            with_usage = [event for event in events if event.get("usage")]
            if options.get("include_usage"):
                assert with_usage == events[-1:]
                assert events[-1]["choices"] == []
                assert events[-1]["usage"]["completion_tokens"] == 2 * len(token_ids)
            elif options:
                counts = [event["usage"]["completion_tokens"] for event in events]
                assert counts == sorted(counts)
                assert counts[-1] == 2 * len(token_ids)
            else:
                assert not with_usage


words = st.sampled_from(["the ", "dog", "\uc548\ub155", "\U0001f600", "END", "E", "ND", " x"])


@settings(deadline=None, max_examples=40)
@given(
    text=st.lists(words, min_size=1, max_size=8).map("".join),
    stop=st.lists(st.sampled_from(["END", "ND", "\ub155", "g\uc548", "dogE"]), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=6),
    is_chat=st.booleans(),
    n=st.integers(1, 2),
)
def test_a_stream_says_what_the_whole_answer_says(codec, text, stop, sizes, is_chat, n):
    """Rows 29 and 53: texts, reasons and usage, whatever the framing."""
    token_ids = ids_of(text)
    cuts = iter([[], *[sizes] * n] if n == 1 else [[], sizes, sizes, []])

    def script(request: GenerateRequest) -> list[Step]:
        allowed = token_ids[: request.sampling.max_tokens]
        end = finished(request, len(allowed), reason=FinishReason.STOP)
        return [*frames(allowed, next(cuts)), end]

    async def both() -> tuple[dict, list]:
        front, backend = make_front(script, codec=codec)
        own = {"messages": CHAT["messages"]} if is_chat else {"prompt": "hi"}
        body = {"model": MODEL, **own, "stop": stop, "n": n, "seed": 3, "max_tokens": 60}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with client_of(front) as client:
            whole = (await client.post(path, json=body)).json()
            stream = events_of((await client.post(path, json={**body, **options})).text)
        first, second = backend.requests[:n], backend.requests[n:]
        assert [a.sampling for a in first] == [b.sampling for b in second]
        assert backend.num_open == 0
        return whole, stream

    whole, stream = asyncio.run(both())
    assert stream.pop() == "[DONE]"
    assert stream.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for event in stream for c in event["choices"] if c["index"] == choice["index"]]
        if is_chat:
            text = "".join(c["delta"].get("content", "") for c in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(c["text"] for c in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        assert not any("\ufffd" in json.dumps(c, ensure_ascii=False) for c in own)


# Clients that leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("has_token", [True, False])
async def test_a_client_that_leaves_ends_its_sequences(codec, stream, has_token):
    """Rows 101 and 102: with and without a stream, before and after the first token."""
    steps: list[Step] = [frame(*ids_of("a"))] if has_token else []
    front, app, backend = served(lambda _: [*steps, asyncio.Event()], codec)
    body = {**COMPLETION, "stream": stream, "n": 3}
    async with Connection(app, "/v1/completions", body) as connection:
        await backend.opened.wait()
        if stream and has_token:
            await connection.message()
            await connection.text_until('"a"')
        connection.leave()
        await connection.ended()
    assert (backend.num_open, backend.num_cut) == (0, 3)
    assert outcome(front, "completions") == {"disconnected": 1}


async def test_a_client_that_leaves_before_its_body_is_through_costs_nothing(codec):
    front, app, backend = served(tokens_then_end([5]), codec)
    connection = Connection(app, "/v1/completions", COMPLETION)
    connection.leave()
    async with connection:
        await connection.ended()
    assert not backend.requests
    assert outcome(front, "completions") == {"disconnected": 1}


async def test_a_server_that_cancels_the_request_ends_its_sequences(codec):
    """Serve cancels the task of a request whose client has left."""
    front, app, backend = served(lambda _: [asyncio.Event()], codec)
    connection = Connection(app, "/v1/completions", COMPLETION)
    await connection.__aenter__()
    await backend.opened.wait()
    assert connection.task is not None
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    await backend.idle.wait()
    assert backend.num_cut == 1
    assert outcome(front, "completions") == {"disconnected": 1}


async def test_a_client_that_reads_nothing_is_given_up(codec, monkeypatch):
    """The last wait without a deadline would be a send that never returns."""
    monkeypatch.setattr("deployments.http_generation._STALLED_S", 0.0)
    front, app, backend = served(tokens_then_end(ids_of("abc")), codec)
    headers = {"x-request-timeout-seconds": "0.05"}
    connection = Connection(app, "/v1/chat/completions", CHAT, headers=headers)

    async def stuck(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(connection, "_send", stuck)
    async with connection:
        await asyncio.wait([connection.task], timeout=10)
        assert connection.task.done()
    assert backend.num_open == 0
    assert outcome(front, "chat_completions") == {"disconnected": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_send_that_fails_is_a_client_that_left(codec, monkeypatch, caplog, stream):
    front, app, backend = served(lambda _: [frame(*ids_of("abc")), LOST], codec)
    connection = Connection(app, "/v1/chat/completions", {**CHAT, "stream": stream})

    async def broken(message: Message) -> None:
        if message["type"] == "http.response.body" or not stream:
            raise BrokenPipeError

    monkeypatch.setattr(connection, "_send", broken)
    async with connection:
        await connection.ended()
    assert backend.num_open == 0
    assert outcome(front, "chat_completions") == {"disconnected": 1}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_other_requests_go_on_while_one_fails(codec):
    """One bad request must never harm another."""
    go = asyncio.Event()
    token_ids = ids_of("abc")

    def script(request: GenerateRequest) -> list[Step]:
        if request.sampling.seed == 1:
            return [frame(*token_ids), LOST]
        return [frame(*token_ids), go, finished(request, len(token_ids))]

    _, app, backend = served(script, codec)
    async with (
        Connection(app, "/v1/chat/completions", {**CHAT, "seed": 2}) as good,
        Connection(app, "/v1/chat/completions", {**CHAT, "seed": 1}) as bad,
    ):
        assert "error" in await bad.rest()
        assert backend.num_open == 1
        go.set()
        assert events_of(await good.rest())[-1] == "[DONE]"


async def test_a_lifespan_is_passed_on(codec):
    _, app, _ = served(tokens_then_end([5]), codec)
    sent: list = []
    received = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive():
        return next(received)

    async def send(message):
        sent.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
