"""Runs a step through the modules of transformers, of which only the attention is ours.

All rows of a step go through the model at once; each layer's attention is the backend's, which
knows whose rows are whose. Whether that holds for a model is seen at load by `self_check`, never
assumed.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from workers.engine.attention.backend import (
    AttentionBackend,
    IntArray,
    LayerScoring,
    StepMetadata,
)
from workers.engine.attention.interface import MaskFunction, packed_forward, use_packed_attention
from workers.runner_choice import RunnerTier

__all__ = ["StockForward"]


class StockForward:
    """`ForwardPass` of every transformers model whose attention goes through its interface.

    Several, even of one model, may run in several threads, one in each.
    """

    def __init__(self, model: torch.nn.Module, backend: AttentionBackend) -> None:
        """Run `model`, a causal language model in eval mode, with `backend` for its attention."""
        use_packed_attention(model)
        self._model = model
        self._backend = backend
        self._handler = _BackendHandler(backend)

    @property
    def tier(self) -> RunnerTier:
        """See `ForwardPass.tier`."""
        return "stock"

    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """See `ForwardPass.logits`."""
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
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """See `AttentionHandler.attend`.

        Blocks hold keys and values of one width: the narrower ones are filled up with zeros, which
        change no score and are cut off the result.
        """
        query, key, value = qkv
        value_dim = value.shape[-1]
        missing = key.shape[-1] - value_dim
        if missing > 0:
            value = pad(value, (0, missing))
        elif missing < 0:
            query, key = pad(query, (0, -missing)), pad(key, (0, -missing))
        attended = self._backend.forward(layer_index, query, key, value, scoring)
        return attended[..., :value_dim] if missing > 0 else attended
