from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from deployments.terminal.client import ApiClient
from deployments.terminal.errors import (
    ApiError,
    BrokenAnswerError,
    RefusedError,
    UnreachableError,
)
from tests.fakes.api_server import ApiScript, api_server

Handle = Callable[[httpx.Request], httpx.Response]


def client_of(handle: Handle, url: str = "http://server:1") -> ApiClient:
    return ApiClient(url, timeout_s=5, transport=httpx.MockTransport(handle))


def answering(response: httpx.Response) -> ApiClient:
    return client_of(lambda request: response)


def failing(error: Exception) -> ApiClient:
    def handle(request: httpx.Request) -> httpx.Response:
        raise error

    return client_of(handle)


def streaming(text: str) -> ApiClient:
    return answering(httpx.Response(200, content=text.encode()))


@pytest.mark.parametrize(
    "url",
    [
        "http://server:1",
        "http://server:1/",
        "http://server:1/v1",
        "http://server:1/v1/",
        "server:1",
    ],
)
def test_addresses_are_taken_in_every_usual_form(url: str) -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    with client_of(handle, url) as client:
        assert client.models() == ["m"]

    assert asked == ["http://server:1/v1/models"]


@pytest.mark.parametrize("url", ["http://server:port", "ftp://server"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UnreachableError, match="not an address"), ApiClient(url, timeout_s=1) as c:
        c.models()


@pytest.mark.parametrize("body", [{}, {"data": 1}, {"data": []}, {"data": [1, {"id": 2}]}])
def test_server_without_models_is_told(body: object) -> None:
    with (
        answering(httpx.Response(200, json=body)) as client,
        pytest.raises(BrokenAnswerError, match="serves no model"),
    ):
        client.models()


def test_post_returns_the_answer_and_sends_the_body() -> None:
    with client_of(lambda request: httpx.Response(200, content=request.content)) as client:
        assert client.post("completions", {"prompt": "π"}) == {"prompt": "π"}


def test_stream_yields_chunks_until_done_and_asks_for_a_stream() -> None:
    bodies: list[dict[str, object]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        text = 'data: {"a": 1}\n\n: keep-alive\n\ndata: {"a": 2}\n\ndata: [DONE]\n\ndata: x\n\n'
        return httpx.Response(200, content=text.encode())

    with client_of(handle) as client:
        assert list(client.stream("completions", {"prompt": "p"})) == [{"a": 1}, {"a": 2}]

    assert bodies == [{"prompt": "p", "stream": True}]


def test_stream_that_ends_without_done_is_broken() -> None:
    with streaming('data: {"a": 1}\n\n') as client:
        chunks = client.stream("completions", {})

        assert next(chunks) == {"a": 1}
        with pytest.raises(BrokenAnswerError, match="broke off"):
            next(chunks)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ('{"message": "the worker was lost"}', "the worker was lost"),
        ('"plain"', "plain"),
        ("{}", "no reason given"),
        ("null", "no reason given"),
    ],
)
def test_error_event_ends_the_stream_with_its_message(error: str, words: str) -> None:
    text = f'data: {{"a": 1}}\n\ndata: {{"error": {error}}}\n\ndata: [DONE]\n\n'
    with streaming(text) as client:
        chunks = client.stream("completions", {})

        assert next(chunks) == {"a": 1}
        with pytest.raises(BrokenAnswerError, match=words):
            next(chunks)


@pytest.mark.parametrize(
    ("text", "words"), [("data: {\n\n", "not JSON"), ("data: [1]\n\n", "not an object")]
)
def test_stream_that_is_not_the_apis_is_broken(text: str, words: str) -> None:
    with streaming(text) as client, pytest.raises(BrokenAnswerError, match=words):
        list(client.stream("completions", {}))


@pytest.mark.parametrize("status", [302, 400, 429, 500])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_error_status_is_told_with_the_servers_message(status: int, is_streamed: bool) -> None:
    class Unread(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b'{"error": {"message": "too long"}}'

    with answering(httpx.Response(status, stream=Unread())) as client:
        call = (lambda *args: list(client.stream(*args))) if is_streamed else client.post
        with pytest.raises(RefusedError, match="too long") as refusal:
            call("completions", {})

    assert refusal.value.status == status


def test_error_status_of_another_kind_of_server_is_told() -> None:
    response = httpx.Response(404, text="<html>")
    with answering(response) as client, pytest.raises(RefusedError, match="is this an OpenAI API"):
        client.models()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (httpx.ConnectError("refused"), UnreachableError, "baton serve"),
        (httpx.ReadTimeout("slow"), UnreachableError, "in time"),
        (httpx.RemoteProtocolError("closed"), BrokenAnswerError, "broke: closed"),
    ],
)
def test_transport_errors_become_sentences(
    error: Exception, kind: type[ApiError], words: str
) -> None:
    with failing(error) as client, pytest.raises(kind, match=words):
        client.post("completions", {})


def test_text_that_is_not_utf8_is_refused() -> None:
    with (
        answering(httpx.Response(200, json={})) as client,
        pytest.raises(ApiError, match="not UTF-8"),
    ):
        client.post("completions", {"prompt": "\udcff"})


def test_nothing_listening_is_told_over_a_real_socket() -> None:
    with api_server(ApiScript()) as url:
        pass  # closed again: nobody listens there now

    with ApiClient(url, timeout_s=5) as client, pytest.raises(UnreachableError, match=url):
        client.models()


def test_closing_the_stream_closes_the_connection() -> None:
    closed: list[bool] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b'data: {"a": 1}\n\n'

        def close(self) -> None:
            closed.append(True)

    with answering(httpx.Response(200, stream=Endless())) as client:
        chunks = client.stream("completions", {})
        next(chunks)
        chunks.close()

    assert closed
