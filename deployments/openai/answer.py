"""What an answer is made of before it takes a wire format: deltas, tokens, ends, usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Candidate", "Delta", "Ending", "TokenEntry", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a choice ended."""

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    """The client's stop string or stop token id that ended it; None for the model's own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A token that stands at a place, or could."""

    token_id: int
    data: bytes
    """Its UTF-8 text; part of a character where that lies across several tokens."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    rank: int
    """1 for the likeliest; 0 where there is no logprob."""

    @property
    def text(self) -> str:
        """Its text; where that is not whole characters, its bytes by number, as OpenAI has it."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """A token of an answer or of its prompt, with what was likely in its place."""

    token: Candidate
    top: tuple[Candidate, ...]
    """The likeliest first, as many as were asked for; the token itself may be among them."""
    offset: int
    """Characters from the start of the prompt to its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became known of one choice since its delta before."""

    index: int
    text: str
    """Whole characters; empty while they are not whole or may begin a stop string."""
    completion_tokens: int
    """Output tokens of this choice so far."""
    ending: Ending | None = None
    """Set on the choice's last delta only."""
    tokens: tuple[TokenEntry, ...] = ()
    """Those of the text, where log-probabilities are asked for."""
    prompt: tuple[TokenEntry, ...] | None = None
    """The prompt's tokens, on the choice's first delta, where they are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request."""

    prompt_tokens: int
    """Each prompt counted once, however many choices it has."""
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that were not computed for this request; None while no worker has said."""
