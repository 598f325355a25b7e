"""A server that is told to stop while it answers: each client hears how its request ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.tools.asking import Ending, ask, make_client
from tests.tools.baton_server import MODEL, WINDOW, BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

MAX_TOKENS = WINDOW - 100
"""More than any host makes of a text while the service drains."""


def story(*, is_stream: bool) -> dict[str, Any]:
    """A request that does not end before its last token."""
    return {
        "model": MODEL,
        "prompt": "The keeper of the light",
        "max_tokens": MAX_TOKENS,
        "min_tokens": MAX_TOKENS,
        "stream": is_stream,
    }


def answer(base_url: str, body: Mapping[str, Any]) -> Ending:
    """How the answer ends; raises where it is cut off without a word."""

    async def asking() -> Ending:
        async with make_client(base_url, timeout_s=120) as client:
            return await ask(client, body)

    return asyncio.run(asking())


def test_requests_that_outlast_the_drain_end_with_an_error(tmp_path) -> None:
    """INV-ONE-END: SIGTERM cuts nobody off, streamed or not."""
    with ThreadPoolExecutor(2) as clients:
        with BatonServer.started(tmp_path, preset="colocated") as server:
            streamed, whole = (
                clients.submit(answer, server.base_url, story(is_stream=is_stream))
                for is_stream in (True, False)
            )
            server.wait_for(
                lambda now: now.value("baton_sequences", role="decode", status="decoding") == 2,
                timeout_s=60,
                what="both are being answered",
            )
        # The end of the block has sent SIGTERM and waited for the last process.
        stream_end, whole_end = streamed.result(timeout=30), whole.result(timeout=30)
    assert "done by" not in server.log.read_text(), "who was told to stop has done so"
    assert stream_end.text != ""
    assert (stream_end.status, stream_end.error_code) == (httpx.codes.OK, "worker_stopping")
    assert stream_end.is_failure
    assert (whole_end.status, whole_end.error_code) == (
        httpx.codes.SERVICE_UNAVAILABLE,
        "worker_stopping",
    )
