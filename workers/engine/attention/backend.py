"""The seam between the model runner and the hardware's attention, and what a step tells it.

`StepMetadata` is built once per step, so that no layer pays for it. Every sequence may bring any
number of query tokens: decode, chunked prefill and verification are one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.geometry import ceil_div
from workers.engine.step import ScheduledSequence, StepPlan

__all__ = ["AttentionBackend", "GroupMetadata", "LayerScoring", "StepMetadata", "build_metadata"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupMetadata:
    """Where a step's tokens are in the blocks of one group of layers."""

    slot_mapping: IntArray
    """`[num_tokens]`: where the token's K and V go, block_id * block_size + offset."""
    seq_lens: IntArray
    """`[num_sequences]`: tokens from the table's first block on, once this step has written its
    own; behind a sliding window fewer than the sequence has."""
    block_tables: tuple[IntArray, ...]
    """Per sequence, the blocks that hold these tokens, in order; not one more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMetadata:
    """One step in numbers; rows are the step's tokens, all sequences one after the other."""

    input_ids: IntArray
    """`[num_tokens]`"""
    positions: IntArray
    """`[num_tokens]`: place of each token in its sequence."""
    cu_seqlens_q: IntArray
    """`[num_sequences + 1]`: sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1]."""
    sampled_rows: IntArray
    """`[num_sampled]`: the last row of each sequence that samples, in the plan's order."""
    groups: tuple[GroupMetadata, ...]
    """As the layout's groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScoring:
    """How a layer turns q.k into weights; the same in every step."""

    scale: float
    """Scores are scale * q.k."""
    sliding_window: int | None
    """A token sees those of its sequence at positions (own - sliding_window, own]; None: all."""
    softcap: float | None
    """Bounds scores to softcap * tanh(score / softcap), where given."""
    sinks: torch.Tensor | None
    """`[heads]`: scores that take part in the softmax without a value."""

    def hides_tokens(self, seq_len: int) -> bool:
        """Whether the last of seq_len tokens does not see all of them."""
        return self.sliding_window is not None and self.sliding_window < seq_len


class AttentionBackend(Protocol):
    """Causal attention of a step's rows over what their sequences hold so far."""

    def prepare(self, meta: StepMetadata) -> None:
        """Take in a step; every `forward` until the next `prepare` belongs to it."""

    def forward(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """Write k and v `[num_tokens, kv_heads, head_dim]` to their slots, then attend with q.

        q is `[num_tokens, heads, head_dim]`, and so is the result. A token sees no token after its
        own, and of those before it what the scoring says.
        """


def build_metadata(plan: StepPlan, block_size: int) -> StepMetadata:
    """Numbers for a plan with at least one sequence.

    IndexError if a block table does not hold its sequence's tokens.
    """
    sequences = plan.sequences
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    cu_seqlens_q = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    positions = np.concatenate(
        [np.arange(sequence.start, sequence.end, dtype=np.int64) for sequence in sequences]
    )
    return StepMetadata(
        input_ids=np.array(
            [token_id for sequence in sequences for token_id in sequence.token_ids], dtype=np.int64
        ),
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        sampled_rows=cu_seqlens_q[1:][[sequence.sampling is not None for sequence in sequences]]
        - 1,
        groups=tuple(
            _group(sequences, group, positions, cu_seqlens_q, block_size)
            for group in range(len(sequences[0].block_tables))
        ),
    )


def _group(
    sequences: Sequence[ScheduledSequence],
    group: int,
    positions: IntArray,
    cu_seqlens_q: IntArray,
    block_size: int,
) -> GroupMetadata:
    starts = np.array([sequence.block_tables[group].start for sequence in sequences])
    tables = tuple(_block_table(sequence, group, block_size) for sequence in sequences)
    blocks = np.concatenate(
        [
            table[positions[first:end] // block_size - start]
            for table, start, first, end in zip(
                tables, starts, cu_seqlens_q, cu_seqlens_q[1:], strict=False
            )
        ]
    )
    ends = np.array([sequence.end for sequence in sequences], dtype=np.int64)
    return GroupMetadata(
        slot_mapping=blocks * block_size + positions % block_size,
        seq_lens=ends - starts * block_size,
        block_tables=tables,
    )


def _block_table(sequence: ScheduledSequence, group: int, block_size: int) -> IntArray:
    table = sequence.block_tables[group]
    end = ceil_div(sequence.end, block_size)
    if table.end < end or table.start * block_size > sequence.start:
        raise IndexError(
            f"tokens {sequence.start} to {sequence.end - 1} need blocks up to {end - 1}, the table "
            f"has {table.start} to {table.end - 1}"
        )
    return np.array(table.block_ids[: end - table.start], dtype=np.int64)
