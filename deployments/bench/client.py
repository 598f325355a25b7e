"""Sends one streaming request to a server of the OpenAI API and notes when its text arrives.

Each request has a connection of its own and is read to its end: some servers drop idle connections
under load, and a client that leaves early disturbs the next measurement.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from configs.addresses import is_loopback
from deployments.bench.errors import BenchInputError
from deployments.bench.measure import Failure, Sample

__all__ = ["TIMEOUT", "RequestStyle", "StreamingClient", "make_http_client", "server_address"]

TIMEOUT = "timeout"
"""The kind of failure of a request that did not end in its time."""

_CONNECT_TIMEOUT_S = 5.0
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStyle:
    """What all requests have in common, whatever the server."""

    is_chat: bool = False
    ignore_eos: bool = False
    """Sent only where it is true: some servers refuse fields that they do not know."""
    temperature: float = 0.0

    def body(self, model: str, prompt: str, output_tokens: int) -> dict[str, Any]:
        """The JSON of one request."""
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.is_chat
            else {"prompt": prompt}
        )
        return {
            "model": model,
            **content,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }

    @property
    def path(self) -> str:
        """The endpoint, below /v1."""
        return "chat/completions" if self.is_chat else "completions"


def server_address(url: str) -> str:
    """The address of a server without a final /v1; the scheme may be left out."""
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        host = httpx.URL(address).host
    except httpx.InvalidURL as error:
        raise BenchInputError(f"{url!r} is not an address: {error}.") from error
    if not host or not address.startswith(("http://", "https://")):
        raise BenchInputError(f"{url!r} is not the address of an HTTP server.")
    return address


def make_http_client(address: str, api_key: str | None) -> httpx.AsyncClient:
    """The connections to one server; the caller closes them."""
    return httpx.AsyncClient(
        base_url=f"{address}/v1/",
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # A proxy from the environment would be asked for its own 127.0.0.1.
        trust_env=not is_loopback(httpx.URL(address).host),
    )


class StreamingClient:
    """Asks one server; `now` is the clock of all times."""

    def __init__(
        self, http: httpx.AsyncClient, model: str, style: RequestStyle, now: Callable[[], float]
    ) -> None:
        self._http = http
        self._model = model
        self._style = style
        self._now = now

    async def ask(
        self, prompt: str, output_tokens: int, *, index: int, due_s: float, timeout_s: float
    ) -> Sample:
        """Send a prompt and wait for the end of its answer, timeout_s at most; never raises.

        `due_s` is when it should be sent, by the clock: what is later is the client's own delay.
        """
        content = json.dumps(self._style.body(self._model, prompt, output_tokens)).encode()
        answer = _Answer()
        sent_s = self._now()
        failure = await self._exchange(content, answer, timeout_s)
        return Sample(
            index=index,
            sent_s=sent_s,
            ended_s=self._now(),
            late_s=max(0.0, sent_s - due_s),
            text_s=tuple(answer.text_s),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            failure=failure or answer.judge(),
        )

    async def _exchange(self, content: bytes, answer: _Answer, timeout_s: float) -> Failure | None:
        """Fill the answer; returns what went wrong on the way."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._stream(content, answer)
        except TimeoutError:
            return Failure(kind=TIMEOUT, message=f"no end within {timeout_s:.1f} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Failure(kind="connect", message=_described(error))
        except httpx.HTTPError as error:
            return Failure(kind="broken", message=_described(error))
        except (ValueError, TypeError, AttributeError) as error:
            return Failure(kind="malformed", message=_described(error))

    async def _stream(self, content: bytes, answer: _Answer) -> Failure | None:
        request = self._http.stream(
            "POST",
            self._style.path,
            content=content,
            headers={"content-type": "application/json"},
        )
        async with request as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                return Failure(
                    kind=f"http {response.status_code}", message=text[:_MESSAGE_CHARACTERS]
                )
            events = _EventSplitter()
            async for chunk in response.aiter_bytes():
                arrived_s = self._now()
                for data in events.feed(chunk):
                    answer.take(data, arrived_s)
        return None


@dataclass(slots=True)
class _Answer:
    """What has arrived of one answer so far."""

    text_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    is_ended: bool = False
    error: str | None = None

    def take(self, data: bytes, arrived_s: float) -> None:
        """One event's data; ValueError, TypeError or AttributeError if it is no chunk."""
        if data == b"[DONE]":
            self.is_ended = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = json.dumps(event["error"])[:_MESSAGE_CHARACTERS]
        self._take_usage(event.get("usage") or {})
        for choice in event.get("choices") or ():
            if _text_of(choice):
                self.text_s.append(arrived_s)
            self.is_ended = self.is_ended or choice.get("finish_reason") is not None

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens", self.cached_tokens)

    def judge(self) -> Failure | None:
        """What is wrong with an answer whose stream came to its end."""
        if self.error is not None:
            return Failure(kind="error event", message=self.error)
        if not self.is_ended:
            return Failure(kind="cut short", message="the stream ended without a finish reason")
        if not self.text_s:
            return Failure(kind="no text", message="the answer has no text")
        return None


class _EventSplitter:
    """Cuts a stream of server-sent events into the data of its lines.

    Works on bytes, since text would also be split at line separators that JSON may hold unescaped.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Data of the lines that are whole by now."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _text_of(choice: Mapping[str, Any]) -> str | None:
    """The text of a chunk's choice, of either endpoint; reasoning is output as well."""
    if "text" in choice:
        text: str | None = choice["text"]
        return text
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]
