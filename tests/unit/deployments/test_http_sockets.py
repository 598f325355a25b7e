"""The application behind a real HTTP server: what a client in the same process cannot show."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import uvicorn

from deployments.http_app import build_app
from tests.fakes.backend import finished, frame
from tests.fakes.front import MODEL, ids_of, make_codec, make_front

COMPLETION = {"model": MODEL, "prompt": "hi"}


class QuietServer(uvicorn.Server):
    """Leaves the process's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self):
        yield

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@asynccontextmanager
async def serving(front):
    """The base URL of a server for a front."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(build_app(front), log_config=None, lifespan="off")
        server = QuietServer(config)
        task = asyncio.create_task(server.serve([listener]))
        await server.is_up.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_a_stream_arrives_token_by_token_and_stops_when_the_socket_closes(codec):
    """Row 101: close the socket after three tokens."""
    letters = ids_of("abc")
    front, backend = make_front(
        lambda _: [*(frame(letter) for letter in letters), asyncio.Event()], codec=codec
    )
    async with serving(front) as url, httpx.AsyncClient(base_url=url) as client:
        body = {**COMPLETION, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            texts: list[str] = []
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if texts == ["a", "b", "c"]:
                    break
            assert backend.num_open == 1
        async with asyncio.timeout(5):
            await backend.idle.wait()
    assert backend.num_cut == 1


async def test_a_whole_answer_stops_when_the_socket_closes(codec):
    """Row 101: the same without a stream."""
    front, backend = make_front(lambda _: [asyncio.Event()], codec=codec)
    async with serving(front) as url, httpx.AsyncClient(base_url=url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await backend.opened.wait()
        request.cancel()
        async with asyncio.timeout(5):
            await backend.idle.wait()
    assert backend.num_cut == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_whole_answer_is_none_that_a_client_left(codec, stream):
    """A server reports the end of an answer as it does a closed socket; the call ends later."""
    (letter,) = ids_of("a")
    ends = asyncio.Event()
    front, backend = make_front(
        lambda request: [frame(letter), finished(request, 1), ends], codec=codec
    )
    async with serving(front) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert response.status_code == 200
        assert backend.num_open == 1
        ends.set()
        async with asyncio.timeout(5):
            await backend.idle.wait()
    assert backend.num_cut == 0
    assert {
        dict(item.labels)["outcome"]: item.value
        for item in front.metrics.snapshot().samples
        if item.name == "baton_requests_total"
    } == {"2xx": 1}


async def test_a_connection_is_kept_for_the_next_request(codec):
    (letter,) = ids_of("a")
    front, _ = make_front(lambda request: [frame(letter), finished(request, 1)], codec=codec)
    async with serving(front) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True, False):
            response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
            assert response.status_code == 200
            assert response.headers["x-request-id"]
        refused = await client.post("/v1/completions", content=b"[]")
        assert refused.status_code == 415
        assert (await client.get("/health")).status_code == 200
