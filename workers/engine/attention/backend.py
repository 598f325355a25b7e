"""The seam between the model runner and the hardware's attention, and what a step tells it.

`StepMetadata` is built once per step, so that no layer pays for it. Every sequence may bring any
number of query tokens: decode, chunked prefill and verification are one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.geometry import ceil_div
from workers.engine.step import ScheduledSequence, StepPlan

__all__ = ["AttentionBackend", "StepMetadata", "build_metadata"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMetadata:
    """One step in numbers; rows are the step's tokens, all sequences one after the other."""

    input_ids: IntArray
    """`[num_tokens]`"""
    positions: IntArray
    """`[num_tokens]`: place of each token in its sequence."""
    slot_mapping: IntArray
    """`[num_tokens]`: where the token's K and V go, block_id * block_size + offset."""
    cu_seqlens_q: IntArray
    """`[num_sequences + 1]`: sequence i has the rows cu_seqlens_q[i] to cu_seqlens_q[i + 1]."""
    seq_lens: IntArray
    """`[num_sequences]`: tokens that have K and V once this step has written its own."""
    block_tables: tuple[IntArray, ...]
    """Per sequence, the blocks that hold its first seq_len tokens, in order; not one more."""
    sampled_rows: IntArray
    """`[num_sampled]`: the last row of each sequence that samples, in the plan's order."""


class AttentionBackend(Protocol):
    """Causal attention of a step's rows over everything their sequences hold so far."""

    def prepare(self, meta: StepMetadata) -> None:
        """Take in a step; every `forward` until the next `prepare` belongs to it."""

    def forward(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write k and v `[num_tokens, kv_heads, head_dim]` to their slots, then attend with q.

        q is `[num_tokens, heads, head_dim]`, and so is the result. A token sees the tokens of its
        own sequence at positions (own - sliding_window, own], or all up to its own where the window
        is None. Scores are scale * q.k, bounded to softcap * tanh(score / softcap) where softcap is
        given; `sinks` `[heads]` are scores that take part in the softmax without a value.
        """


def build_metadata(plan: StepPlan, block_size: int) -> StepMetadata:
    """Numbers for a plan with at least one sequence.

    IndexError if a block table is too short for its sequence's tokens.
    """
    sequences = plan.sequences
    starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    cu_seqlens_q = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    tables = tuple(_block_table(sequence, block_size) for sequence in sequences)
    positions = np.concatenate(
        [np.arange(sequence.start, sequence.end, dtype=np.int64) for sequence in sequences]
    )
    blocks = np.concatenate(
        [
            table[positions[first:end] // block_size]
            for table, first, end in zip(tables, cu_seqlens_q, cu_seqlens_q[1:], strict=False)
        ]
    )
    return StepMetadata(
        input_ids=np.array(
            [token_id for sequence in sequences for token_id in sequence.token_ids], dtype=np.int64
        ),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=starts + lengths,
        block_tables=tables,
        sampled_rows=cu_seqlens_q[1:][[sequence.sampling is not None for sequence in sequences]]
        - 1,
    )


def _block_table(sequence: ScheduledSequence, block_size: int) -> IntArray:
    num_blocks = ceil_div(sequence.end, block_size)
    if len(sequence.block_ids) < num_blocks:
        raise IndexError(
            f"{sequence.end} tokens need {num_blocks} blocks, the table has "
            f"{len(sequence.block_ids)}"
        )
    return np.array(sequence.block_ids[:num_blocks], dtype=np.int64)
