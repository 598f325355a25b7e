"""Runs a step through stock transformers modules: plan in, sampled tokens out.

All rows of a step go through the model at once; each layer's attention is the backend's, which
knows whose rows are whose. Whether that holds for a model is seen at load by `self_check`, never
assumed. Owns no memory: weights belong to the model, keys and values to the `KVCache`.
"""

from __future__ import annotations

import torch

from workers.engine.attention.backend import (
    AttentionBackend,
    IntArray,
    StepMetadata,
    build_metadata,
)
from workers.engine.attention.interface import MaskFunction, packed_forward, use_packed_attention
from workers.engine.sampler import SamplingRow, sample
from workers.engine.step import SequenceId, StepPlan, StepResult

__all__ = ["RaggedModelRunner"]


class RaggedModelRunner:
    """`ModelRunner` for every transformers model whose attention goes through its interface.

    Used by one thread at a time; several runners, even of one model, may run in several threads.
    """

    def __init__(
        self, model: torch.nn.Module, backend: AttentionBackend, *, block_size: int
    ) -> None:
        """Run `model`, a causal language model in eval mode, with `backend` for its attention."""
        use_packed_attention(model)
        self._model = model
        self._backend = backend
        self._handler = _BackendHandler(backend)
        self._block_size = block_size

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
        """Run a step; returns the logits `[len(rows), vocabulary]` of some of its rows."""
        self._backend.prepare(meta)
        return packed_forward(self._model, self._handler, meta.input_ids, meta.positions, rows)


class _BackendHandler:
    """Hands a model's attention on to a backend."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def mask(self, mask_function: MaskFunction) -> None:
        """The backend knows what each row may see."""

    def attend(
        self,
        layer_index: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionHandler.attend`."""
        return self._backend.forward(
            layer_index,
            *qkv,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
