"""Runs a step: plan in, sampled tokens out.

How the logits come about is the forward pass's business (`runners`). Owns no memory: weights belong
to the model, keys and values to the `KVCache`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kv_transfer.logprobs import TokenLogprobs
from workers.engine.attention.backend import IntArray, StepMetadata, build_metadata
from workers.engine.logprobs import Sampled, logprobs_of, sample_with_logprobs
from workers.engine.runners.forward import ForwardPass
from workers.engine.sampler import SamplingRow
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.runner_choice import RunnerChoice

__all__ = ["RaggedModelRunner"]


class RaggedModelRunner:
    """`ModelRunner` that gives all sequences of a step to one forward pass, in one row of tokens.

    Used by one thread at a time; several runners, even of one model, may run in several threads.
    """

    def __init__(
        self,
        forward: ForwardPass,
        *,
        block_size: int,
        settle: Callable[[], None] = lambda: None,
        choice: RunnerChoice | None = None,
    ) -> None:
        """Run steps with `forward`, over a pool whose blocks hold block_size tokens.

        `settle` returns when what the forward pass wrote is written: a GPU does that later.
        `choice` says why it is this forward pass; without one, it is by hand.
        """
        self.choice = choice or RunnerChoice(
            tier=forward.tier, cause="by_hand", reason="whoever made the runner chose it"
        )
        """See `ModelRunner.choice`."""
        self._forward = forward
        self._block_size = block_size
        self._settle = settle

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute KV for every row of a plan, and sample where it asks for that.

        A sequence whose logits are not finite is named in the result's `failed`; the others are
        unharmed. ValueError for a plan without sequences.
        """
        if not plan.sequences:
            raise ValueError(f"step {plan.step_id} has no sequences")
        meta = build_metadata(plan, self._block_size)
        num_sampled = len(meta.sampled_rows)
        logits = self.logits(meta, np.concatenate([meta.sampled_rows, *_scored_rows(plan, meta)]))
        # Sampling changes logits in place, but none of those that are scored.
        scored = _score(plan, logits[num_sampled:])
        result = _result(plan, _sample(plan, logits[:num_sampled]), scored)
        self._settle()  # a chunk that samples nothing has waited for nothing, and may be read next
        return result

    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """See `ForwardPass.logits`."""
        return self._forward.logits(meta, rows)


def _sample(plan: StepPlan, logits: torch.Tensor) -> dict[SequenceId, Sampled | None]:
    """A token for each sequence that samples; None where its logits are not finite."""
    rows = {
        sequence.sequence_id: SamplingRow(
            params=sequence.sampling,
            position=sequence.end,
            num_output_tokens=sequence.num_output_tokens,
            seen=sequence.seen,
        )
        for sequence in plan.sequences
        if sequence.sampling is not None
    }
    return dict(zip(rows, sample_with_logprobs(logits, list(rows.values())), strict=True))


def _scored_rows(plan: StepPlan, meta: StepMetadata) -> list[IntArray]:
    """For each sequence that is scored, its rows that a prompt token follows."""
    return [
        np.arange(first, first + len(sequence.scoring.token_ids))
        for sequence, first in zip(plan.sequences, meta.cu_seqlens_q, strict=False)
        if sequence.scoring is not None
    ]


def _score(
    plan: StepPlan, logits: torch.Tensor
) -> dict[SequenceId, tuple[TokenLogprobs, ...] | None]:
    """Log-probabilities for each sequence that is scored; None where any is not finite."""
    scored: dict[SequenceId, tuple[TokenLogprobs, ...] | None] = {}
    start = 0
    for sequence in plan.sequences:
        if sequence.scoring is None:
            continue
        token_ids = sequence.scoring.token_ids
        end = start + len(token_ids)
        found = logprobs_of(logits[start:end], token_ids, sequence.scoring.num_top)
        whole = tuple(logprobs for logprobs in found if logprobs is not None)
        scored[sequence.sequence_id] = whole if len(whole) == len(found) else None
        start = end
    return scored


def _result(
    plan: StepPlan,
    sampled: dict[SequenceId, Sampled | None],
    scored: dict[SequenceId, tuple[TokenLogprobs, ...] | None],
) -> StepResult:
    failed = {
        sequence.sequence_id: f"the logits up to position {sequence.end} are not finite"
        for sequence in plan.sequences
        if None in (sampled.get(sequence.sequence_id, 0), scored.get(sequence.sequence_id, ()))
    }
    done = {number: row for number, row in sampled.items() if row is not None}
    return StepResult(
        step_id=plan.step_id,
        token_ids={number: row.token_id for number, row in done.items()},
        logprobs={number: row.logprobs for number, row in done.items() if row.logprobs is not None},
        prompt_logprobs={number: rows for number, rows in scored.items() if rows is not None},
        failed=failed,
    )
