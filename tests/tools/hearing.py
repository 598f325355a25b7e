"""What a client hears of one request, piece by piece: for those that leave, or are kept waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["TOKEN_IDS", "Heard", "hear"]

TOKEN_IDS: Mapping[str, Any] = {"logprobs": 0, "return_tokens_as_token_ids": True}
"""The fields of a request that is to be answered with the ids of its tokens."""

_PATH = "/v1/completions"
_DATA = "data: "
_TOKEN_ID = "token_id:"


@dataclass(slots=True, kw_only=True)
class Heard:
    """One request, as far as its client has heard; filled in while it goes on."""

    status: int | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Of the text; none unless they are asked for, by `TOKEN_IDS`."""
    num_tokens: int | None = None
    """As the server has counted them: it says so at the end."""
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Codes of the error body, or of error events."""
    times: list[float] = field(default_factory=list)
    """When pieces of text came, by the caller's clock."""
    is_over: bool = False
    """A whole body, or `[DONE]`."""
    num_late: int = 0
    """Events after the end; there must be none."""

    @property
    def ending(self) -> str:
        """`finished`, `failed <code>`, or `broken`: neither, or more than one of them."""
        if self.num_late or len(self.finish_reasons) + len(self.errors) != 1:
            return "broken"
        if self.errors:
            return f"failed {self.errors[0]}"
        return "finished" if self.is_over and self.status == httpx.codes.OK else "broken"

    def take(self, answer: Mapping[str, Any], now: float) -> None:
        """Add a body or an event."""
        if self.is_over or self.errors:
            self.num_late += 1
        if "error" in answer:
            self.errors.append(str(answer["error"]["code"]))
            return
        if answer.get("usage") is not None:
            self.num_tokens = answer["usage"]["completion_tokens"]
        for choice in answer["choices"]:
            if choice["text"]:
                self.text += choice["text"]
                self.times.append(now)
            if choice.get("logprobs") is not None:
                names = choice["logprobs"]["tokens"]
                self.token_ids += [int(name.removeprefix(_TOKEN_ID)) for name in names]
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])


async def hear(
    client: httpx.AsyncClient, body: Mapping[str, Any], heard: Heard, clock: Callable[[], float]
) -> None:
    """Ask for one choice and listen to the end; cancelling it closes the connection.

    Raises `httpx.TransportError` where the connection breaks.
    """
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    async with client.stream("POST", _PATH, json=body) as response:
        heard.status = response.status_code
        if response.status_code != httpx.codes.OK or not body.get("stream"):
            answer = json.loads(await response.aread())
            heard.take(answer, clock())
            heard.is_over = True
            return
        async for line in response.aiter_lines():
            data = line.removeprefix(_DATA)
            if data == line:
                continue  # a comment that keeps the connection open, or the line between events
            if data == "[DONE]":
                heard.num_late += heard.is_over
                heard.is_over = True
            else:
                heard.take(json.loads(data), clock())
