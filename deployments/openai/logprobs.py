"""Log-probabilities as clients read them: those of completions, of chat, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.openai.answer import Candidate, TokenEntry

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

_LOWEST = -9999.0
"""JSON has no infinity; OpenAI's service and vLLM write this for what is next to impossible."""


def completion_logprobs(tokens: Sequence[TokenEntry], *, by_id: bool = False) -> dict[str, Any]:
    """The `logprobs` of a completion's choice, with tokens named by their text or by their id.

    The alternatives of a token are an object by name; the token itself is always among them. A
    prompt's first token has null for both.
    """
    return {
        "tokens": [_name(entry.token, by_id) for entry in tokens],
        "token_logprobs": [_number(entry.token) for entry in tokens],
        "top_logprobs": [_by_name(entry, by_id) for entry in tokens],
        "text_offset": [entry.offset for entry in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenEntry], *, by_id: bool = False) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice, with tokens named as in completions.

    `bytes` are those of the text, however a token is named.
    """
    return {
        "content": [
            {
                **_candidate(entry.token, by_id),
                "top_logprobs": [_candidate(each, by_id) for each in entry.top],
            }
            for entry in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(tokens: Sequence[TokenEntry]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token an object by id, null for the first."""
    return [
        None if entry.token.logprob is None else _by_id((*entry.top, entry.token))
        for entry in tokens
    ]


def _number(candidate: Candidate) -> float | None:
    return None if candidate.logprob is None else max(candidate.logprob, _LOWEST)


def _name(candidate: Candidate, by_id: bool) -> str:
    return f"token_id:{candidate.token_id}" if by_id else candidate.text


def _candidate(candidate: Candidate, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(candidate, by_id),
        "logprob": _number(candidate),
        "bytes": list(candidate.data),
    }


def _by_name(entry: TokenEntry, by_id: bool) -> dict[str, float | None] | None:
    if entry.token.logprob is None:
        return None
    # Two tokens may have one text: the likelier one stands for it, but never for the token itself.
    by_name = {_name(each, by_id): _number(each) for each in reversed(entry.top)}
    return {**dict(reversed(by_name.items())), _name(entry.token, by_id): _number(entry.token)}


def _by_id(candidates: Sequence[Candidate]) -> dict[str, Any]:
    return {
        str(each.token_id): {
            "logprob": _number(each),
            "rank": each.rank,
            "decoded_token": each.text,
        }
        for each in candidates
    }
