"""Runs a step through stock transformers modules: plan in, sampled tokens out.

All rows of a step go through the model as one sequence `[1, num_tokens]` without a cache and
without a mask; the model's own attention interface leads each layer to the paged backend, which
knows whose rows are whose. Whether that holds for a model is proved at load by `self_check`, never
assumed. Owns no memory: weights belong to the model, keys and values to the `KVCache`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engine.attention.backend import (
    AttentionBackend,
    IntArray,
    StepMetadata,
    build_metadata,
)
from workers.engine.sampler import SamplingRow, sample
from workers.engine.step import SequenceId, StepPlan, StepResult
from workers.errors import UnsupportedModelError

__all__ = ["RaggedModelRunner", "use_ragged_attention"]

_ATTENTION_NAME = "baton_ragged"

_current_backend: ContextVar[AttentionBackend] = ContextVar("baton_attention_backend")
# Set for the time of one forward pass, in the thread that runs it. Keyword arguments would be the
# plainer way, but some models drop them; and two runners may share one model.


def use_ragged_attention(model: torch.nn.Module) -> None:
    """Lead the model's attention to the backend of whichever runner runs it; safe to repeat."""
    AttentionInterface.register(_ATTENTION_NAME, _ragged_attention)
    # Without a mask function of the same name some models build a mask of num_tokens squared.
    AttentionMaskInterface.register(_ATTENTION_NAME, _no_mask)
    model.set_attn_implementation(_ATTENTION_NAME)  # type: ignore[operator]


class RaggedModelRunner:
    """`ModelRunner` for every transformers model whose attention goes through its interface.

    Used by one thread at a time; several runners, even of one model, may run in several threads.
    """

    def __init__(
        self, model: torch.nn.Module, backend: AttentionBackend, *, block_size: int
    ) -> None:
        """Run `model`, a causal language model in eval mode, with `backend` for its attention."""
        self._model = model
        self._backend = backend
        self._block_size = block_size
        use_ragged_attention(model)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's keys and values and sample where it says so; at least one sequence.

        A sequence whose logits are not finite is reported in `failed`; the others are unharmed.
        """
        meta = build_metadata(plan, self._block_size)
        logits = self.logits(meta, meta.sampled_rows)
        sampling = [sequence for sequence in plan.sequences if sequence.sampling is not None]
        rows = [
            SamplingRow(
                params=sequence.sampling,
                position=sequence.end,
                num_output_tokens=sequence.num_output_tokens,
            )
            for sequence in sampling
            if sequence.sampling is not None
        ]
        token_ids: dict[SequenceId, int] = {}
        failed: dict[SequenceId, str] = {}
        for sequence, token_id in zip(sampling, sample(logits, rows), strict=True):
            if token_id is None:
                failed[sequence.sequence_id] = (
                    f"the logits at position {sequence.end} are not finite"
                )
            else:
                token_ids[sequence.sequence_id] = token_id
        return StepResult(step_id=plan.step_id, token_ids=token_ids, failed=failed)

    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """Run a step and return the logits `[len(rows), vocabulary]` of some of its rows.

        With no rows the model's head is not run.
        """
        token = _current_backend.set(self._backend)
        try:
            with torch.inference_mode():
                self._backend.prepare(meta)
                output = self._model(
                    input_ids=_one_row(meta.input_ids),
                    position_ids=_one_row(meta.positions),
                    use_cache=False,
                    logits_to_keep=torch.from_numpy(np.ascontiguousarray(rows)),
                )
                logits: torch.Tensor = output.logits[0]
                return logits
        finally:
            _current_backend.reset(token)


def _one_row(values: IntArray) -> torch.Tensor:
    return torch.from_numpy(values).unsqueeze(0)


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: q, k, v `[1, heads, num_tokens, head_dim]`."""
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} adds a bias to its attention scores")
    layer_index = getattr(module, "layer_idx", None)
    if layer_index is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is")
    attended = _current_backend.get().forward(
        layer_index,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return attended.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The backend knows what each row may see."""
