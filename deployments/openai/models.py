"""The models that are served: what Front must know of each, and how /v1/models shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """How it is run, by its configuration; the workers have the last word."""
    default_max_tokens: int = 1024
    """Output tokens where the client names no maximum, if the window has the room."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0
    """Seconds since 1970 at which serving began."""


def model_object(card: ModelCard, runners: Mapping[str, RunnerChoice]) -> dict[str, Any]:
    """The body of GET /v1/models/{id}; `runners` is how each worker, by its id, runs the model.

    Without any, it is run as its configuration says, as far as anybody knows.
    """
    workers: dict[RunnerChoice, list[str]] = {}
    for worker_id in sorted(runners):
        workers.setdefault(runners[worker_id], []).append(worker_id)
    # Where they differ: as the first decode worker does, for decode sorts before prefill.
    shown = next(iter(workers), card.runner)
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "max_model_len": card.window,
        "baton": {
            **_runner(shown),
            "runner_source": "workers" if workers else "configuration",
            "runners": [{**_runner(choice), "workers": ids} for choice, ids in workers.items()],
        },
    }


def model_list(cards: Iterable[ModelCard], runners: Mapping[str, RunnerChoice]) -> dict[str, Any]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [model_object(card, runners) for card in cards]}


def _runner(choice: RunnerChoice) -> dict[str, str]:
    return {
        "runner": choice.tier,
        "runner_cause": choice.cause,
        "runner_reason": choice.reason,
    }
