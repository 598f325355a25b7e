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

from workers.engine.step import StepPlan

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

    @property
    def num_sequences(self) -> int:
        """Sequences in the step."""
        return len(self.seq_lens)


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
    lengths = np.array([len(sequence.token_ids) for sequence in plan.sequences], dtype=np.int64)
    starts = np.array([sequence.start for sequence in plan.sequences], dtype=np.int64)
    cu_seqlens_q = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    seq_lens = starts + lengths
    tables = tuple(
        _block_table(sequence.block_ids, int(seq_len), block_size)
        for sequence, seq_len in zip(plan.sequences, seq_lens, strict=True)
    )
    ends = cu_seqlens_q[1:]
    positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - cu_seqlens_q[:-1], lengths)
    blocks, offsets = np.divmod(positions, block_size)
    first_entries = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum([len(table) for table in tables[:-1]], out=first_entries[1:])
    block_ids = np.concatenate(tables)[blocks + np.repeat(first_entries, lengths)]
    return StepMetadata(
        input_ids=np.fromiter(
            (token_id for sequence in plan.sequences for token_id in sequence.token_ids),
            np.int64,
            int(ends[-1]),
        ),
        positions=positions,
        slot_mapping=block_ids * block_size + offsets,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_tables=tables,
        sampled_rows=ends[[sequence.sampling is not None for sequence in plan.sequences]] - 1,
    )


def _block_table(block_ids: tuple[int, ...], seq_len: int, block_size: int) -> IntArray:
    num_blocks = -(-seq_len // block_size)
    if len(block_ids) < num_blocks:
        raise IndexError(
            f"{seq_len} tokens need {num_blocks} blocks, the table has {len(block_ids)}"
        )
    return np.array(block_ids[:num_blocks], dtype=np.int64)
