"""How one sequence's next token is chosen; validated at the edge, trusted here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one sequence.

    Every random draw is a function of (seed, position in the sequence) alone, so that batching,
    the split between workers, and resuming cannot change the text.
    """

    max_tokens: int
    """Output tokens at most; at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest; 0 drops none."""
    seed: int = 0
    """64 bits; Front draws one where the client gives none."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many output tokens."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence: the model's end tokens (unless ignored) and the client's."""
