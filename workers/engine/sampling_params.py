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
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and output are less likely; below 1, more. Positive."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that it is in the output."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    logprobs: int | None = None
    """Alternatives whose log-probabilities come with each output token; None asks for none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the sequence: the model's end tokens (unless ignored) and the client's."""

    @property
    def has_penalties(self) -> bool:
        """Whether a token's chance depends on which tokens there are already."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )
