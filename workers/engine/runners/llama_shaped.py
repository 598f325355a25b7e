"""A decoder of our own for the Llama-shaped families: the stock weights, fewer operations.

Where the order of floating-point operations can be seen in fp32 tokens it is that of the stock
modules. Rotary angles come from the model's own module, and what each layer asks of its attention
from the model's own calls, so every variant of either is covered. Whether the whole computes what
the stock model does is compared at load, with the real weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from workers.engine.attention.backend import (
    AttentionBackend,
    IntArray,
    LayerScoring,
    StepMetadata,
)
from workers.engine.runners.decoder_layer import DecoderLayer, RmsNorm, read_layer, read_norm
from workers.runner_choice import RunnerTier

__all__ = ["LlamaShapedDecoder", "LlamaShapedForward"]


class _Rotation(NamedTuple):
    """Rotary angles of a step's rows, with an axis for the heads: `[num_tokens, 1, rotary_dim]`."""

    cos: torch.Tensor
    sin_of_first: torch.Tensor
    """For the first half of a head's rotated columns, `[num_tokens, 1, rotary_dim / 2]`."""
    sin_of_second: torch.Tensor

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn heads `[num_tokens, heads, head_dim]`; columns behind rotary_dim stay."""
        rotary_dim = self.cos.shape[-1]
        turned = heads[..., :rotary_dim] if rotary_dim < heads.shape[-1] else heads
        half = rotary_dim // 2
        first, second = turned[..., :half], turned[..., half:]
        result = turned * self.cos
        result[..., :half].addcmul_(second, self.sin_of_first, value=-1)
        result[..., half:].addcmul_(first, self.sin_of_second)
        if rotary_dim == heads.shape[-1]:
            return result
        turned.copy_(result)
        return heads


class LlamaShapedDecoder:
    """A model's weights as this forward pass uses them; shared by all that run the model."""

    def __init__(self, model: Any, scorings: Sequence[LayerScoring]) -> None:
        """Take over a stock causal language model, whose layers score their attention like that.

        Its modules still work afterwards. Raises `UnsupportedModelError` for another shape.
        """
        body, config = model.model, model.config
        self.embedding: torch.nn.Module = body.embed_tokens
        self.device: torch.device = model.device
        self.embedding_scale: float = getattr(config, "embedding_multiplier", 1.0)
        self.rotary: torch.nn.Module = body.rotary_emb
        self.layers: tuple[DecoderLayer, ...] = tuple(
            read_layer(module, index, scoring)
            for index, (module, scoring) in enumerate(zip(body.layers, scorings, strict=True))
        )
        self.norm: RmsNorm = read_norm(body.norm)
        self.logits_divisor: float = getattr(config, "logits_scaling", 1.0)
        self.logits_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        has_kinds = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.rotary_kinds: tuple[str | None, ...] = (
            tuple(config.layer_types) if has_kinds else (None,) * len(self.layers)
        )
        """By layer; layers of different kinds may have different angles."""
        self._model = model

    def embed(self, input_ids: IntArray) -> torch.Tensor:
        """Token ids -> the hidden rows `[num_tokens, width]` that the first layer takes."""
        hidden: torch.Tensor = self.embedding(torch.from_numpy(input_ids).to(self.device))
        return hidden if self.embedding_scale == 1.0 else hidden * self.embedding_scale

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Hidden rows after the last norm -> logits `[num_rows, vocabulary]`."""
        logits: torch.Tensor = self._model.get_output_embeddings()(rows)
        if self.logits_divisor != 1.0:
            logits = logits / self.logits_divisor
        if self.logits_softcap is not None:
            logits = torch.tanh(logits / self.logits_softcap) * self.logits_softcap
        return logits


class LlamaShapedForward:
    """`ForwardPass` of the Llama-shaped families."""

    def __init__(
        self,
        decoder: LlamaShapedDecoder,
        backend: AttentionBackend,
        watch: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Run the decoder with `backend` for its attention.

        `watch` is shown the hidden rows before each layer, and those before the last norm, and may
        change them in place: so the check at load sees one layer at a time.
        """
        self._decoder = decoder
        self._backend = backend
        self._watch = watch

    @property
    def tier(self) -> RunnerTier:
        """See `ForwardPass.tier`."""
        return "llama_shaped"

    @torch.inference_mode()
    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """See `ForwardPass.logits`."""
        self._backend.prepare(meta)
        decoder = self._decoder
        hidden = decoder.embed(meta.input_ids)
        positions = torch.from_numpy(meta.positions).to(decoder.device)
        rotations = self._rotations(hidden, positions.unsqueeze(0))
        *inner, last = zip(decoder.layers, decoder.rotary_kinds, strict=True)
        for layer, kind in inner:
            self._show(layer.index, hidden)
            attended = self._attend(layer, hidden, rotations[kind])
            _finish(layer, hidden, attended)
        layer, kind = last
        self._show(layer.index, hidden)
        attended = self._attend(layer, hidden, rotations[kind])
        if not np.array_equal(rows, np.arange(len(hidden))):
            # Nothing attends to what the last layer makes of the other rows.
            kept = torch.from_numpy(rows).to(decoder.device)
            hidden, attended = hidden[kept], attended[kept]
        _finish(layer, hidden, attended)
        self._show(len(decoder.layers), hidden)
        return decoder.head(decoder.norm(hidden))

    def _show(self, place: int, hidden: torch.Tensor) -> None:
        if self._watch is not None:
            self._watch(place, hidden)

    def _rotations(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> dict[str | None, _Rotation]:
        """By kind of layer, from the model's own module."""
        rotations = {}
        for kind in set(self._decoder.rotary_kinds):
            options = {} if kind is None else {"layer_type": kind}
            cos, sin = self._decoder.rotary(hidden, positions, **options)
            cos, sin = cos[0].unsqueeze(1).to(hidden.dtype), sin[0].unsqueeze(1).to(hidden.dtype)
            half = sin.shape[-1] // 2
            rotations[kind] = _Rotation(cos, sin[..., :half], sin[..., half:])
        return rotations

    def _attend(
        self, layer: DecoderLayer, hidden: torch.Tensor, rotation: _Rotation
    ) -> torch.Tensor:
        """What the layer's heads see, `[num_tokens, heads * head_dim]`; writes keys and values."""
        rows = hidden if layer.before_attention is None else layer.before_attention(hidden)
        heads = layer.qkv(rows).view(len(rows), -1, layer.head_dim)
        num_qk = layer.num_heads + layer.num_kv_heads
        query_key = heads[:, :num_qk]
        if layer.qk_norm is not None:
            query_key = layer.qk_norm(query_key)
        if layer.is_rotated:
            query_key = rotation.apply(query_key)
        attended = self._backend.forward(
            layer.index,
            query_key[:, : layer.num_heads],
            query_key[:, layer.num_heads :],
            heads[:, num_qk:],
            layer.scoring,
        )
        return attended.reshape(len(rows), -1)


def _finish(layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor) -> None:
    """Add the layer's two parts to hidden rows, in place."""
    scale = layer.residual_scale
    if layer.after_attention is None:
        layer.attention_out.add_to(hidden, attended, scale)
    else:
        hidden.add_(layer.after_attention(layer.attention_out(attended)), alpha=scale)
    rows = hidden if layer.before_mlp is None else layer.before_mlp(hidden)
    gated = layer.activation(layer.gate(rows)).mul_(layer.up(rows))
    if layer.after_mlp is None:
        layer.down.add_to(hidden, gated, scale)
    else:
        hidden.add_(layer.after_mlp(layer.down(gated)), alpha=scale)
