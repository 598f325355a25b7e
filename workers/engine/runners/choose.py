"""Which way a model is run, by its configuration alone; the checks at load have the last word.

T1, `llama_shaped`: our own decoder, for the families that it was verified for.
T2, `stock`: the modules of transformers, for everything else that can be packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LLAMA_SHAPED_TYPES", "RunnerChoice", "RunnerTier", "choose_runner"]

RunnerTier = Literal["llama_shaped", "stock"]

LLAMA_SHAPED_TYPES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)
"""Values of `model_type`; each is compared with transformers' tokens in the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """A way of running a model, and why it is that one."""

    tier: RunnerTier
    reason: str


def choose_runner(model_type: str) -> RunnerChoice:
    """The choice for a configuration's `model_type`."""
    if model_type in LLAMA_SHAPED_TYPES:
        return RunnerChoice(tier="llama_shaped", reason=f"{model_type} is Llama-shaped")
    return RunnerChoice(
        tier="stock", reason=f"the decoder of our own is not verified for {model_type}"
    )
