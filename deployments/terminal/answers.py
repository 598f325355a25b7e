"""One answer of a server, streamed or whole, written as it comes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Protocol

from deployments.terminal.client import Json
from deployments.terminal.errors import BrokenAnswerError

__all__ = ["Api", "Write", "ask"]

Write = Callable[[str], None]
"""Shows a piece of text at once."""


class Api(Protocol):
    """What is needed of `ApiClient`."""

    def post(self, path: str, body: Json) -> Json:
        """The whole answer."""
        ...

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """The answer's chunks; closing it cancels the request."""
        ...


def ask(api: Api, path: str, body: Json, write: Write, *, is_streamed: bool = True) -> str | None:
    """Write the answer to a completion or chat request; returns its finish reason.

    Raises ApiError. However it ends, the request does not go on after it.
    """
    if not is_streamed:
        return _write_choice(api.post(path, body), write)
    finish_reason = None
    with closing(api.stream(path, body)) as chunks:
        for chunk in chunks:
            finish_reason = _write_choice(chunk, write) or finish_reason
    return finish_reason


def _write_choice(answer: Json, write: Write) -> str | None:
    """Write the only choice that was asked for; its finish reason, once there is one."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BrokenAnswerError("The server sent an answer without choices.")
    if not choices:  # a chunk that holds the usage only
        return None
    text = _text(choices[0])
    if text:
        write(text)
    reason: str | None = choices[0].get("finish_reason")
    return reason


def _text(choice: Json) -> str:
    """Text of a completion's choice, or of a chat's message or part of one."""
    holder = choice if "text" in choice else choice.get("delta") or choice.get("message") or {}
    text = holder.get("text" if holder is choice else "content")
    return text if isinstance(text, str) else ""
