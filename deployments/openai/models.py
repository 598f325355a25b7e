"""The models that are served: what Front must know of each, and how /v1/models shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from workers.runner_choice import RunnerChoice

__all__ = ["ModelCard", "SamplingDefaults", "model_list", "model_object"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the model's makers recommend (its generation config); None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """One served model."""

    name: str
    window: int
    """Tokens of prompt and output together, at most."""
    vocab_size: int
    """Token ids of prompts are in [0, vocab_size)."""
    eos_token_ids: frozenset[int]
    """All ids that end an answer: the tokenizer's and the generation config's."""
    runner: RunnerChoice
    """How it is run, by its configuration; the metric `baton_runner_info` has the last word."""
    default_max_tokens: int = 1024
    """Output tokens where the client names no maximum, if the window has the room."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0
    """Seconds since 1970 at which serving began."""


def model_object(card: ModelCard) -> dict[str, Any]:
    """The body of GET /v1/models/{id}."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.window,
        "baton": {"runner": card.runner.tier, "runner_reason": card.runner.reason},
    }


def model_list(cards: Iterable[ModelCard]) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [model_object(card) for card in cards]}
