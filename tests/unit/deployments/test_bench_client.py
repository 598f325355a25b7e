from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest

from deployments.bench.client import (
    RequestStyle,
    StreamingClient,
    make_http_client,
    server_address,
)
from deployments.bench.errors import BenchInputError
from deployments.bench.measure import Sample
from tests.fakes.bench import DONE, ScriptedStream, VirtualClock, event, text_event, usage_event

END = text_event("", "length")


async def ask(
    parts: Sequence[tuple[float, bytes]] | Callable[[httpx.Request], httpx.Response],
    *,
    style: RequestStyle | None = None,
    timeout_s: float = 60.0,
    due_s: float = 0.0,
) -> Sample:
    clock = VirtualClock()

    def respond(request: httpx.Request) -> httpx.Response:
        if callable(parts):
            return parts(request)
        return httpx.Response(200, stream=ScriptedStream(clock, parts))

    async with httpx.AsyncClient(
        base_url="http://server/v1/", transport=httpx.MockTransport(respond)
    ) as http:
        client = StreamingClient(http, "tiny", style or RequestStyle(), clock.now)
        asking = client.ask("Once", 4, index=3, due_s=due_s, timeout_s=timeout_s)
        return await clock.run(asking)


async def test_text_is_stamped_when_its_chunk_arrives() -> None:
    parts = [
        (0.5, b": keep-alive\n\n" + text_event("")),
        (1.0, text_event("a")),
        (1.5, text_event("b")),
        (3.0, END + usage_event(7, 5, cached=2) + DONE),
    ]

    seen = await ask(parts)

    assert seen.failure is None
    assert (seen.index, seen.sent_s, seen.text_s) == (3, 0.0, (1.0, 1.5))
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens) == (7, 5, 2)
    assert seen.ended_s == 3.0


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_chunks_may_end_anywhere(size: int) -> None:
    content = text_event("é\u2028") + text_event("b", "stop").replace(b"\n", b"\r\n") + DONE
    parts = [(0.1 * i, content[i : i + size]) for i in range(0, len(content), size)]

    seen = await ask(parts)

    assert seen.failure is None
    assert len(seen.text_s) == 2


async def test_a_stream_need_not_say_done_after_its_finish_reason() -> None:
    seen = await ask([(1.0, text_event("a", "length"))])

    assert seen.failure is None
    assert (seen.tokens, seen.prompt_tokens) == (1, None)


async def test_chat_and_reasoning_are_text() -> None:
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "a"}, None]
    parts = [
        (float(i), event({"choices": [{"delta": delta, "finish_reason": None}]}))
        for i, delta in enumerate(deltas)
    ]

    seen = await ask([*parts, (9.0, DONE)], style=RequestStyle(is_chat=True))

    assert seen.text_s == (1.0, 2.0)


async def test_the_clients_own_delay_is_told() -> None:
    seen = await ask([(0.0, text_event("a", "stop"))], due_s=-0.25)

    assert seen.late_s == 0.25


@pytest.mark.parametrize(
    ("style", "path", "expected"),
    [
        (RequestStyle(), "/v1/completions", {"prompt": "Once", "temperature": 0}),
        (RequestStyle(ignore_eos=True), "/v1/completions", {"ignore_eos": True}),
        (
            RequestStyle(is_chat=True, temperature=0.5),
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Once"}], "temperature": 0.5},
        ),
    ],
)
async def test_the_request_says_what_was_chosen(
    style: RequestStyle, path: str, expected: dict[str, object]
) -> None:
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=text_event("a", "stop"))

    await ask(respond, style=style)

    body = json.loads(asked[0].content)
    assert asked[0].url.path == path
    assert asked[0].headers["content-type"] == "application/json"
    assert expected.items() <= body.items()
    assert body["max_tokens"] == 4
    assert body["model"] == "tiny"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert ("ignore_eos" in body) is style.ignore_eos


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (text_event("a") + event({"error": {"message": "lost"}}), "error event", "lost"),
        (text_event("a"), "cut short", "finish reason"),
        (END + DONE, "no text", "no text"),
        (b"data: {nonsense\n\n", "malformed", "JSONDecodeError"),
        (b"data: 7\n\n", "malformed", "TypeError"),
        (event({"choices": [7]}), "malformed", "TypeError"),
        (event(["choices"]), "malformed", "AttributeError"),
    ],
)
async def test_what_is_wrong_with_an_answer_has_a_kind(
    content: bytes, kind: str, words: str
) -> None:
    seen = await ask([(1.0, content)])

    assert seen.failure is not None
    assert seen.failure.kind == kind
    assert words in seen.failure.message


async def test_a_refusal_is_counted_by_its_status() -> None:
    seen = await ask(lambda request: httpx.Response(429, json={"error": "full"}))

    assert seen.failure is not None
    assert seen.failure.kind == "http 429"
    assert "full" in seen.failure.message
    assert seen.text_s == ()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError, "connect"),
        (httpx.ConnectTimeout, "connect"),
        (httpx.RemoteProtocolError, "broken"),
        (httpx.ReadError, "broken"),
    ],
)
async def test_a_connection_that_fails_has_a_kind(
    error: type[httpx.TransportError], kind: str
) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        raise error("it is gone")

    seen = await ask(respond)

    assert seen.failure is not None
    assert (seen.failure.kind, seen.failure.message) == (kind, f"{error.__name__}: it is gone")


class SilentAfterText(httpx.AsyncByteStream):
    """A server that is never heard of again."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield text_event("a")
        await asyncio.Event().wait()


async def test_a_request_without_end_is_bounded_and_keeps_what_it_saw() -> None:
    seen = await ask(lambda request: httpx.Response(200, stream=SilentAfterText()), timeout_s=0.05)

    assert seen.failure is not None
    assert seen.failure.kind == "timeout"
    assert len(seen.text_s) == 1


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("https://server/v1/", "https://server"),
        ("http://server/base", "http://server/base"),
    ],
)
def test_an_address_is_taken_in_any_usual_form(url: str, address: str) -> None:
    assert server_address(url) == address


@pytest.mark.parametrize("url", ["ftp://server", "http://", "http://server:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(BenchInputError, match="address"):
        server_address(url)


async def test_the_key_is_sent_where_there_is_one() -> None:
    for key, sent in ((None, None), ("secret", "Bearer secret")):
        async with make_http_client("http://127.0.0.1:1", key) as http:
            assert http.headers.get("authorization") == sent
            assert str(http.base_url) == "http://127.0.0.1:1/v1/"
