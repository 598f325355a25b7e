"""Runs a step: plan in, sampled tokens out.

How the logits come about is the forward pass's business (`runners`). Owns no memory: weights belong
to the model, keys and values to the `KVCache`.
"""

from __future__ import annotations

import torch

from workers.engine.attention.backend import IntArray, StepMetadata, build_metadata
from workers.engine.runners.forward import ForwardPass
from workers.engine.sampler import SamplingRow, sample
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.runner_choice import RunnerTier

__all__ = ["RaggedModelRunner"]


class RaggedModelRunner:
    """`ModelRunner` that gives all sequences of a step to one forward pass, in one row of tokens.

    Used by one thread at a time; several runners, even of one model, may run in several threads.
    """

    def __init__(self, forward: ForwardPass, *, block_size: int) -> None:
        """Run steps with `forward`, over a pool whose blocks hold block_size tokens."""
        self._forward = forward
        self._block_size = block_size

    @property
    def tier(self) -> RunnerTier:
        """See `ModelRunner.tier`."""
        return self._forward.tier

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute KV for every row of a plan, and sample where it asks for that.

        A sequence whose logits are not finite is named in the result's `failed`; the others are
        unharmed. ValueError for a plan without sequences.
        """
        if not plan.sequences:
            raise ValueError(f"step {plan.step_id} has no sequences")
        meta = build_metadata(plan, self._block_size)
        logits = self.logits(meta, meta.sampled_rows)
        rows: dict[SequenceId, SamplingRow] = {
            sequence.sequence_id: SamplingRow(
                params=sequence.sampling,
                position=sequence.end,
                num_output_tokens=sequence.num_output_tokens,
            )
            for sequence in plan.sequences
            if sequence.sampling is not None
        }
        sampled = dict(zip(rows, sample(logits, list(rows.values())), strict=True))
        return StepResult(
            step_id=plan.step_id,
            token_ids={key: token_id for key, token_id in sampled.items() if token_id is not None},
            failed={
                key: f"the logits for position {rows[key].position} are not finite"
                for key, token_id in sampled.items()
                if token_id is None
            },
        )

    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """See `ForwardPass.logits`."""
        return self._forward.logits(meta, rows)
