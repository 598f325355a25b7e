"""What one engine step does and what came back: the border between deciding and doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.block_table import BlockTable
from workers.engine.sampling_params import SamplingParams
from workers.engine.token_counts import SeenTokens

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """Which prompt tokens a chunk's rows are to be compared with."""

    token_ids: tuple[int, ...]
    """The token after that of the chunk's first row, of its second ...: the last row of a prompt
    has none, what comes after it is sampled."""
    num_top: int
    """Alternatives for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """One sequence's share of a step: KV is computed for `token_ids` from `start` on."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    """Position of the first of them = tokens of the sequence that have KV before the step."""
    block_tables: tuple[BlockTable, ...]
    """By group; each covers what these tokens see, themselves included."""
    sampling: SamplingParams | None
    """None for a prompt chunk that is not the last: nothing is sampled."""
    num_output_tokens: int = 0
    """Output tokens before this step (min_tokens counts them)."""
    seen: SeenTokens | None = None
    """The tokens before the one that is sampled; only where the sampling has penalties."""
    scoring: PromptScoring | None = None
    """For a prompt chunk whose tokens' log-probabilities are asked for."""

    @property
    def end(self) -> int:
        """Position after the last input token = position of the token sampled here."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Sequences that run together in one step, decodes first."""

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    num_streams: int = 0
    """How many of them decode, a row each; the others' rows are prompt tokens."""

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled tokens of a step, for the sequences that sampled."""

    step_id: int
    token_ids: Mapping[SequenceId, int]
    logprobs: Mapping[SequenceId, TokenLogprobs] = field(default_factory=dict)
    """Of the sampled tokens, for the sequences whose sampling asks for them."""
    prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Of the tokens in `PromptScoring`, for each sequence that had one."""
    failed: Mapping[SequenceId, str] = field(default_factory=dict)
    """Sequences whose logits were not finite, with the reason: no token of theirs may be used."""
