"""How fast one engine is, learned from its own steps: what streams take, what prompt tokens add."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.step import StepPlan
from workers.fading import FadingLine, FadingRatio

__all__ = ["FEW_TOKENS", "Load", "StepPace"]

_HALF_LIFE_TOKENS = 2048.0
"""Of what is known about prompt tokens: a few chunks, so that a busy host shows within a prompt."""

FEW_TOKENS = 64
"""Of a prompt: as many as nearly every host computes within a target, and enough that reading the
weights for them alone does not cost several times what they do."""

_HALF_LIFE_STEPS = 32.0
"""Of what is known about steps of streams alone: a second or two of decoding."""


class StepPace:
    """Seconds of steps, by the streams and the prompt tokens in them.

    A step's time is that of its streams alone, which is learned from steps without a prompt, and
    what each prompt token adds; a worker that never has streams counts the fixed part of a step to
    its prompt tokens. How long the sequences are already is left out: it changes slowly,
    and what was measured lately has it.
    """

    def __init__(self) -> None:
        self._streams = FadingLine(half_life=_HALF_LIFE_STEPS)
        self._prompt = FadingRatio(half_life=_HALF_LIFE_TOKENS)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        num_prompt_tokens = plan.num_tokens - plan.num_streams
        if num_prompt_tokens == 0:
            self._streams.observe(plan.num_streams, seconds)
        else:
            added = max(0.0, seconds - self.streams_s(plan.num_streams))
            self._prompt.observe(added, num_prompt_tokens)

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that a prompt token adds to a step; None before one was computed."""
        return self._prompt.value

    def streams_s(self, num_streams: int) -> float:
        """Seconds of a step of so many streams, for none its fixed part; 0 before any was seen."""
        return self._streams.at(num_streams) or 0.0

    def prompt_tokens_within(self, seconds: float, num_streams: int) -> int:
        """Prompt tokens that fit a step of so many streams in that time.

        Where nobody knows what they cost, few: they tell how many fit the next step.
        """
        token_s = self.prompt_token_s
        if not token_s:
            return FEW_TOKENS
        return max(0, int((seconds - self.streams_s(num_streams)) / token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a prompt that came now would meet in an engine."""

    queued_tokens: int
    """Prompt tokens that are still to be computed, of running and waiting sequences."""
    prompt_token_s: float | None
    """See `StepPace`; None where nothing was measured yet."""
    num_streams: int
    """Sequences that decode."""
    streams_s: float
    """Seconds of a step of these alone; of none, its fixed part."""
    step_tokens: int
    """Prompt tokens of one sequence that a step computes beside them, at least 1."""
