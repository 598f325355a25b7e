"""One request to `/v1/completions` as a client sees it end: whole, failed, or neither."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.tools.baton_server import MODEL

__all__ = ["Ending", "ask", "make_client", "story_request"]

_PATH = "/v1/completions"
_DATA = "data: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended."""

    status: int
    text: str = ""
    error_code: str | None = None
    """Of the error body, or of the stream's error event."""
    is_whole: bool = False
    """A body that is no error, or a stream up to `[DONE]`."""

    @property
    def is_failure(self) -> bool:
        """Whether the client was told that the server failed, and nothing else."""
        in_stream = self.status == httpx.codes.OK and self.error_code is not None
        return (self.status >= 500 or in_stream) and not self.is_whole


def make_client(base_url: str, *, timeout_s: float) -> httpx.AsyncClient:
    """A client that opens a connection for each request that needs one."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits)


def story_request(number: int) -> dict[str, Any]:
    """A greedy request; another number gives another text.

    Even ones have a prompt of 15 tokens, odd ones of 209, which prefill computes; two of four are
    streams. Along these texts the likeliest logit leads by 0.18 or more, so that no rounding
    changes them.
    """
    days = [f"Day {day}: the keeper of light {number} saw {day * 3} ships." for day in range(1, 14)]
    return {
        "model": MODEL,
        "prompt": " ".join(days if number % 2 else days[:1]),
        "max_tokens": 16,
        "temperature": 0,
        "stream": number % 4 < 2,
    }


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Ending:
    """Send a request and read its answer to the end; cancelling it closes the connection."""
    async with client.stream("POST", _PATH, json=body) as response:
        if response.status_code != httpx.codes.OK:
            error = json.loads(await response.aread())["error"]
            return Ending(status=response.status_code, error_code=error["code"])
        if body.get("stream"):
            return await _read_stream(response)
        answer = json.loads(await response.aread())
        return Ending(status=200, text=answer["choices"][0]["text"], is_whole=True)


async def _read_stream(response: httpx.Response) -> Ending:
    text, error_code, is_whole = "", None, False
    async for line in response.aiter_lines():
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA)
        if data == "[DONE]":
            is_whole = True
            continue
        event = json.loads(data)
        if "error" in event:
            error_code = event["error"]["code"]
        else:
            text += event["choices"][0]["text"]
    return Ending(status=200, text=text, error_code=error_code, is_whole=is_whole)
