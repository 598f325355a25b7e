"""What a sequence's owner learns from the engine, in order; the last event ends the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.block_table import BlockTable
from workers.engine.step import SequenceId
from workers.errors import WorkerError


class FinishReason(Enum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The sequence holds all blocks that it can ever need."""

    sequence_id: SequenceId
    block_tables: tuple[BlockTable, ...]
    """By group: what it holds now, from the first block that a transfer would write to."""
    num_hit_tokens: int = 0
    """Prefix hit: leading prompt tokens whose KV is there, a whole number of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkComputed:
    """A prompt chunk of a prefill-only sequence is in its blocks; the last chunk has one too."""

    sequence_id: SequenceId
    num_computed: int
    """Leading prompt tokens that have KV now."""
    block_tables: tuple[BlockTable, ...]
    """By group; every block that is needed after the prompt stays in them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """As in `PromptScored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Log-probabilities that the sequence asks for of its next prompt tokens, in order.

    All of them together are those of every prompt token but the first, and all come before the
    first output token.
    """

    sequence_id: SequenceId
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptComputed:
    """A prefill-only sequence is computed and HELD: its blocks are pinned until released.

    Comes right after the `ChunkComputed` of the last chunk.
    """

    sequence_id: SequenceId
    first_token: int
    num_hit_tokens: int = 0
    """Of the prompt, found rather than computed."""
    logprobs: TokenLogprobs | None = None
    """Of the first token, where the sequence asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """New output tokens; a stop token is never among them."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    num_hit_tokens: int = 0
    """Of the prompt, found here rather than computed."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of them where the sequence asks for them, else of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The sequence ended by itself."""

    sequence_id: SequenceId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """Sampled tokens, the stop token included."""
    num_hit_tokens: int = 0
    """Of the prompt, found here rather than computed."""
    stop_token_id: int | None = None
    """The stop token that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReleased:
    """A HELD sequence was released by its owner: its blocks are free."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAborted:
    """The sequence was cancelled."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailed:
    """The sequence cannot go on."""

    sequence_id: SequenceId
    error: WorkerError


TerminalEvent = SequenceFinished | SequenceReleased | SequenceAborted | SequenceFailed
"""Each sequence gets exactly one of these, as its last event (INV-ONE-END)."""

TERMINAL_EVENTS: Final = (SequenceFinished, SequenceReleased, SequenceAborted, SequenceFailed)
"""The same, for isinstance."""

Event = Admitted | ChunkComputed | PromptScored | PromptComputed | TokensSampled | TerminalEvent
"""Everything that a sink can be called with."""
