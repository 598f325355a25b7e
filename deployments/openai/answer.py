"""What an answer is made of before it takes a wire format: deltas, ends, usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Delta", "Ending", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a choice ended."""

    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    """The client's stop string or stop token id that ended it; None for the model's own end."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request."""

    prompt_tokens: int
    """Each prompt counted once, however many choices it has."""
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that were not computed for this request; None while no worker has said."""
