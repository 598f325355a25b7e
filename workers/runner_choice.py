"""Which way a model is run, or that it is not, by its configuration alone.

T1, `llama_shaped`: Baton's own decoder, for the families that it was verified for.
T2, `stock`: the modules of transformers, for everything else that can be packed.
`refused`: what is known to keep more than keys and values, or to attend in a way of its own.

Neither list can be complete: the checks at load (`engine/runners`) see the model at work and have
the last word. This one speaks before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

__all__ = [
    "LLAMA_SHAPED_TYPES",
    "Architecture",
    "RunnerCause",
    "RunnerChoice",
    "RunnerTier",
    "architecture_of",
    "choose_runner",
    "runner_of",
]

RunnerTier = Literal["llama_shaped", "stock"]
RunnerCause = Literal[
    "verified_family", "other_family", "own_differs", "own_failed", "by_hand", "refused"
]
"""Why a model is run as it is, in a word: its family is one that Baton's own decoder was verified
for, or none of those; the own decoder was not what the stock modules are with these weights, or
failed; whoever made the runner chose; the model is not run."""

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

_RECURRENT = "it has recurrent layers, whose state blocks of keys and values cannot hold"
_ALIBI = "it adds ALiBi biases to its attention scores, which Baton's attention does not know"
_OUTSIDE = "it computes its attention itself, not through transformers' attention interface"
_REFUSED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2"),
                *("mamba", "mamba2", "minimax", "qwen3_next", "recurrent_gemma", "rwkv"),
                *("zamba", "zamba2"),
            ),
            _RECURRENT,
        ),
        **dict.fromkeys(("bloom", "mpt"), _ALIBI),
        **dict.fromkeys(("falcon", "gpt_neo", "xglm"), _OUTSIDE),
        "diffllama": "each of its layers attends twice, but a block holds one set of keys",
    }
)
_HELD_KINDS = frozenset({"attention", "full_attention", "sliding_attention"})
_CHUNKED = "chunked_attention"
_CHUNKED_TYPES: Mapping[str, int] = MappingProxyType({"llama4_text": 8192})
"""The chunk, in tokens, of a family that attends in chunks, where its configuration says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a configuration says about how a model is computed."""

    model_type: str
    layer_kinds: frozenset[str] = frozenset()
    """Empty where the configuration leaves them to its family."""
    attention_chunk_size: int | None = None
    """Tokens; None where nothing attends in chunks."""
    is_encoder_decoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """A way of running a model, and why it is that one."""

    tier: RunnerTier | Literal["refused"]
    cause: RunnerCause
    """For programs, and labels."""
    reason: str
    """For people."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """From config.json, or from a configuration as a dictionary; of composite models the text part.

    Whatever is not of the expected type counts as not said.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    model_type = str(config.get("model_type"))
    inner_type = str(parts[-1].get("model_type"))
    kinds = parts[-1].get("layer_types")
    chunk = parts[-1].get("attention_chunk_size", _CHUNKED_TYPES.get(inner_type))
    return Architecture(
        model_type=model_type,
        layer_kinds=frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset(),
        attention_chunk_size=chunk if isinstance(chunk, int) else None,
        is_encoder_decoder=any(part.get("is_encoder_decoder") is True for part in parts),
    )


def choose_runner(architecture: Architecture, *, window: int) -> RunnerChoice:
    """The choice for requests of up to `window` tokens."""
    reason = _refusal(architecture, window)
    if reason is not None:
        return RunnerChoice(tier="refused", cause="refused", reason=reason)
    return runner_of(architecture.model_type)


def runner_of(model_type: str) -> RunnerChoice:
    """The choice for a family that can be run."""
    if model_type in LLAMA_SHAPED_TYPES:
        return RunnerChoice(
            tier="llama_shaped",
            cause="verified_family",
            reason=f"{model_type} is Llama-shaped",
        )
    return RunnerChoice(
        tier="stock",
        cause="other_family",
        reason=f"Baton's own decoder is not verified for {model_type}",
    )


def _refusal(architecture: Architecture, window: int) -> str | None:
    if architecture.is_encoder_decoder:
        return "it is an encoder-decoder, and what its encoder computes is not held in blocks"
    if architecture.model_type in _REFUSED_TYPES:
        return _REFUSED_TYPES[architecture.model_type]
    if strange := sorted(architecture.layer_kinds - _HELD_KINDS - {_CHUNKED}):
        return f"blocks of keys and values do not hold what layers of kind {strange[0]} keep"
    chunk = architecture.attention_chunk_size
    if chunk is not None and chunk < window:
        return (
            f"its layers attend in chunks of {chunk} tokens, which is right only up to there: "
            f"lower model.max_model_len from {window} to {chunk}"
        )
    return None
