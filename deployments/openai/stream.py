"""Answers in the two dialects: bodies, and the chunks of server-sent event streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.openai.answer import Delta, Ending, TokenEntry, Usage
from deployments.openai.errors import error_reply
from deployments.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs

__all__ = [
    "KEEP_ALIVE",
    "ChatDialect",
    "Choice",
    "CompletionDialect",
    "Dialect",
    "StreamEncoder",
    "collect",
    "to_json",
]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the stream is alive."""
_DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8; half a surrogate pair goes out as the escape that it came in as."""
    return _encode(value).encode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A whole choice, as a body without streaming has it."""

    index: int
    text: str
    ending: Ending
    tokens: tuple[TokenEntry, ...]
    prompt: tuple[TokenEntry, ...] | None


class Dialect(Protocol):
    """How one endpoint writes an answer; every method returns a JSON object."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text, where there is one."""

    def text_chunk(self, delta: Delta) -> dict[str, Any]:
        """Text of a choice, with its tokens."""

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
        """The end of a choice."""

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage and no choice."""

    def body(self, choices: Iterable[Choice]) -> dict[str, Any]:
        """A whole answer without its usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What all objects of one answer begin with."""

    id: str
    created: int
    model: str
    has_logprobs: bool = False
    """Whether the client asks for the text's tokens."""
    has_token_ids: bool = False
    """Whether it wants them named by id."""

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _ending_fields(ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"finish_reason": None}
    return {"finish_reason": ending.finish_reason, "stop_reason": ending.stop_reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDialect(_Head):
    """/v1/completions."""

    def opening(self, index: int) -> None:
        """Completions have no opening chunk."""

    def text_chunk(self, delta: Delta) -> dict[str, Any]:
        """Text of a choice, with its tokens."""
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        return self._chunk(delta.index, delta.text, logprobs, None, delta.prompt)

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
        """The end of a choice."""
        return self._chunk(index, "", None, ending, None)

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage and no choice."""
        return self._object("text_completion", [])

    def body(self, choices: Iterable[Choice]) -> dict[str, Any]:
        """A whole answer without its usage."""
        return self._object(
            "text_completion",
            [
                self._choice(
                    choice.index,
                    choice.text,
                    self._logprobs(choice.tokens) if self.has_logprobs else None,
                    choice.ending,
                    choice.prompt,
                )
                for choice in choices
            ],
        )

    def _logprobs(self, tokens: Sequence[TokenEntry]) -> dict[str, Any]:
        return completion_logprobs(tokens, by_id=self.has_token_ids)

    def _chunk(self, index: int, *fields: Any) -> dict[str, Any]:
        return self._object("text_completion", [self._choice(index, *fields)])

    @staticmethod
    def _choice(
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        ending: Ending | None,
        prompt: tuple[TokenEntry, ...] | None,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, **_ending_fields(ending)}
        return choice if prompt is None else {**choice, "prompt_logprobs": prompt_logprobs(prompt)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDialect(_Head):
    """/v1/chat/completions."""

    def opening(self, index: int) -> dict[str, Any]:
        """The role, before any text."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def text_chunk(self, delta: Delta) -> dict[str, Any]:
        """Text of a choice, with its tokens."""
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        chunk = self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
        return _with_prompt(chunk, delta.prompt)

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
        """The end of a choice."""
        return self._chunk(index, {}, ending=ending)

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage and no choice."""
        return self._object("chat.completion.chunk", [])

    def body(self, choices: Iterable[Choice]) -> dict[str, Any]:
        """A whole answer without its usage."""
        shown = list(choices)
        body = self._object(
            "chat.completion",
            [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.tokens) if self.has_logprobs else None,
                    **_ending_fields(choice.ending),
                }
                for choice in shown
            ],
        )
        return _with_prompt(body, next((choice.prompt for choice in shown), None))

    def _logprobs(self, tokens: Sequence[TokenEntry]) -> dict[str, Any]:
        return chat_logprobs(tokens, by_id=self.has_token_ids)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        ending: Ending | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **_ending_fields(ending)}
        return self._object("chat.completion.chunk", [choice])


def _with_prompt(answer: dict[str, Any], prompt: tuple[TokenEntry, ...] | None) -> dict[str, Any]:
    """An answer has one prompt, however many choices."""
    return answer if prompt is None else {**answer, "prompt_logprobs": prompt_logprobs(prompt)}


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` of a body or a chunk."""
    known = usage.cached_tokens is not None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if known else None,
    }


class StreamEncoder:
    """The events of one stream, in order: deltas, then the end or an error.

    After an error there is no `[DONE]`: a client can tell a whole answer from a cut one.
    """

    def __init__(
        self, dialect: Dialect, *, prompt_tokens: int, include_usage: bool, continuous_usage: bool
    ) -> None:
        self._dialect = dialect
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._completion_tokens: dict[int, int] = {}
        """By choice; a choice is in it once it has been opened."""

    def delta(self, delta: Delta) -> bytes:
        """The events of one delta; none for one without text or end."""
        chunks = []
        if delta.index not in self._completion_tokens:
            chunks.append(self._dialect.opening(delta.index))
        self._completion_tokens[delta.index] = delta.completion_tokens
        if delta.text or delta.tokens or delta.prompt is not None:
            chunks.append(self._dialect.text_chunk(delta))
        if delta.ending is not None:
            chunks.append(self._dialect.end_chunk(delta.index, delta.ending))
        return b"".join(self._event(chunk) for chunk in chunks if chunk is not None)

    def done(self, usage: Usage) -> bytes:
        """The last events of a stream whose choices have all ended."""
        if not self._include_usage:
            return _DONE
        chunk = {**self._dialect.usage_chunk(), "usage": usage_object(usage)}
        return _data(chunk) + _DONE

    def error(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        return _data(error_reply(error).body)

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage_object(
                Usage(
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=sum(self._completion_tokens.values()),
                )
            )
        elif self._include_usage:
            chunk["usage"] = None
        return _data(chunk)


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def collect(dialect: Dialect, deltas: Iterable[Delta], usage: Usage) -> bytes:
    """The body of an answer without streaming, from the same deltas that a stream is made of."""
    of_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        of_choice.setdefault(delta.index, []).append(delta)
    choices = [_joined(of_choice[index]) for index in sorted(of_choice)]
    return to_json({**dialect.body(choices), "usage": usage_object(usage)})


def _joined(deltas: Sequence[Delta]) -> Choice:
    """All deltas of a choice, whose last one has its end."""
    ending = deltas[-1].ending
    assert ending is not None, "a choice without an end"
    return Choice(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        ending=ending,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        prompt=deltas[0].prompt,
    )
