"""How much one engine takes on: the limits of a scheduler, and which sequences never fit them."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.sequence import SequenceSpec
from workers.errors import ContextOverflowError, DeadlineExceededError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_model_len: int
    """The window: prompt and output tokens of one sequence."""
    max_sequences: int
    """Sequences that are admitted at a time, HELD ones aside."""
    step_tokens: int
    """Rows of one forward pass at most."""
    prefill_chunk_tokens: int
    """Prompt tokens of one sequence in one step at most."""
    queue_limit: int
    """Sequences that wait at most."""
    scored_tokens: int = 64
    """Prompt tokens in one step at most whose log-probabilities are asked for: each takes a row of
    logits as long as the vocabulary, 40 MB for so many of a large one. Chunks of such a prompt end
    at its multiples."""
    aging_s: float = 10.0
    """Seconds of waiting that are worth one level of priority."""
    step_target_s: float | None = None
    """A step takes no more prompt tokens than fit this time, as measured, but a few at least:
    nothing of a sequence that ends can be given back before its step. None: as many as the other
    limits allow."""
    gap_target_s: float | None = None
    """While sequences decode, no more than fit this time either, but a block at least."""

    def __post_init__(self) -> None:
        sizes = (
            self.max_model_len,
            self.max_sequences,
            self.prefill_chunk_tokens,
            self.scored_tokens,
        )
        if min(sizes) < 1:
            raise ValueError(f"limits of a scheduler must be at least 1: {self}")
        if self.step_tokens < self.max_sequences:
            # Otherwise a decoding sequence, or the prefill behind it, could get no row in a step.
            raise ValueError(
                f"step_tokens {self.step_tokens} must be at least "
                f"max_sequences {self.max_sequences}: each decodes one token a step"
            )
        if self.queue_limit < 0 or self.aging_s < 0:
            raise ValueError(f"queue_limit and aging_s must not be negative: {self}")
        for target_s in (self.step_target_s, self.gap_target_s):
            if target_s is not None and target_s <= 0:
                raise ValueError(f"step_target_s and gap_target_s must be positive: {self}")

    def target_s(self, num_streams: int) -> float | None:
        """Seconds that a step of so many streams and some prompt tokens may take; None: any."""
        targets = [self.step_target_s, self.gap_target_s if num_streams else None]
        return min((target_s for target_s in targets if target_s is not None), default=None)

    def refuse_impossible(self, spec: SequenceSpec, now: float) -> None:
        """Raise for a sequence that no room could help.

        `ContextOverflowError`, `DeadlineExceededError`, or ValueError for what is not a request.
        """
        prompt = len(spec.prompt_token_ids) - spec.num_resumed
        max_tokens = spec.sampling.max_tokens
        if prompt < 1 or max_tokens < 1:
            raise ValueError(
                f"a sequence needs a prompt and output: {prompt} prompt tokens, "
                f"max tokens {max_tokens}"
            )
        if not 0 <= spec.num_resumed < max_tokens:
            raise ValueError(f"{spec.num_resumed} output tokens of {max_tokens} to go on from")
        if prompt + max_tokens > self.max_model_len:
            raise ContextOverflowError(
                f"the window is {self.max_model_len} tokens; the prompt has {prompt} "
                f"and max tokens is {max_tokens}, together {prompt + max_tokens}"
            )
        if spec.deadline is not None and spec.deadline <= now:
            raise DeadlineExceededError("the deadline had passed when the request arrived")
