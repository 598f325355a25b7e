"""The weights of Llama-shaped decoder layers, read out of the stock modules.

What a layer has (biases, norms before or after its parts, norms of queries and keys, one matrix or
several) is read off its modules, not off the family's name. Queries, keys and values become one
matrix; the stock modules keep views of it, so that they still work and nothing is held twice. Gate
and up stay two, or become two views: torch multiplies 4 to 256 rows with both a tenth faster that
way (SmolLM2-135M's shapes, fp32, Zen 3, one thread).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from workers.engine.attention.backend import LayerScoring
from workers.errors import UnsupportedModelError

__all__ = ["DecoderLayer", "Linear", "RmsNorm", "WidthNorm", "read_layer", "read_norm"]


_FEW_ROWS = 4
"""Up to here a CPU multiplies a matrix of more rows than columns the other way round: with 2 to 4
rows torch's fp32 product of [rows, in] and [in, out] takes 1.3 to 1.6 times as long as that of
[out, in] and [in, rows]. From 12 rows on it is the other way round again."""


class Linear:
    """A matrix and its bias."""

    __slots__ = ("_is_wide", "_transposed", "bias", "weight")

    def __init__(self, *, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep weight `[out, in]` and bias `[out]`; both stay where they are."""
        self.weight = weight
        self.bias = bias
        self._transposed = weight.t()
        is_float = weight.dtype == torch.float32 and weight.is_cpu
        self._is_wide = is_float and len(weight) > weight.shape[1]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` -> `[num_rows, out]`, contiguous, in new memory."""
        if self._is_wide and 1 < len(rows) <= _FEW_ROWS:
            product = torch.mm(self.weight, rows.t()).t().contiguous()
            return product if self.bias is None else product.add_(self.bias)
        return linear(rows, self.weight, self.bias)

    def add_to(self, total: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
        """total += scale * self(rows), in place."""
        if self.bias is None:
            total.addmm_(rows, self._transposed, alpha=scale)
        else:
            total.add_(self(rows), alpha=scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RmsNorm:
    """Scales rows to a mean square of one, then each column by its weight."""

    weight: torch.Tensor
    """`[width]`, or one for each head `[heads, width]`.

    In fp32 where the product is rounded after the weight (Gemma, OLMo 2), not before.
    """
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> the same shape, in new memory."""
        width = self.weight.shape[-1:]
        if rows.dtype == torch.float32 and self.weight.dim() == 1:
            return rms_norm(rows, width, self.weight, self.eps)
        if self.weight.dtype == rows.dtype:
            return rms_norm(rows, width, None, self.eps).mul_(self.weight)
        return rms_norm(rows.float(), width, None, self.eps).mul_(self.weight).to(rows.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WidthNorm:
    """Norms of all query heads together, and of all key heads together."""

    query: RmsNorm
    key: RmsNorm
    num_heads: int

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries, then keys: `[num_tokens, heads + kv_heads, head_dim]` -> the same shape."""
        query, key = heads[:, : self.num_heads].flatten(1), heads[:, self.num_heads :].flatten(1)
        return torch.cat([self.query(query), self.key(key)], dim=1).view(heads.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One layer's weights; a norm that the layer does not have is None."""

    index: int
    scoring: LayerScoring
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_rotated: bool
    before_attention: RmsNorm | None
    qkv: Linear
    """Queries, then keys, then values."""
    qk_norm: RmsNorm | WidthNorm | None
    """Of each head, with a weight for each, or of all of a kind together."""
    attention_out: Linear
    after_attention: RmsNorm | None
    before_mlp: RmsNorm | None
    gate: Linear
    up: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: Linear
    after_mlp: RmsNorm | None
    residual_scale: float


def read_layer(module: Any, index: int, scoring: LayerScoring) -> DecoderLayer:
    """Layer `index` of a Llama-shaped model; fuses the module's matrices.

    Raises `UnsupportedModelError` for a layer without one of the parts that all of them have.
    """
    try:
        return _read_layer(module, index, scoring)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} is not Llama-shaped: {error}"
        ) from None


def _read_layer(module: Any, index: int, scoring: LayerScoring) -> DecoderLayer:
    attention, mlp = module.self_attn, module.mlp
    head_dim = attention.head_dim
    # Layers with one norm for each part call the second one by the place that it has in Llama.
    before = getattr(module, "input_layernorm", None)
    before_mlp = getattr(module, "pre_feedforward_layernorm", None)
    after = module.post_attention_layernorm
    if before is not None and before_mlp is None:
        before_mlp, after = after, None
    qkv = _qkv(attention)
    num_heads = attention.o_proj.in_features // head_dim
    num_kv_heads = (len(qkv.weight) // head_dim - num_heads) // 2
    gate, up = _gate_up(mlp)
    return DecoderLayer(
        index=index,
        scoring=scoring,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        is_rotated=bool(getattr(attention, "use_rope", True)),
        before_attention=_optional_norm(before),
        qkv=qkv,
        qk_norm=_qk_norm(attention, num_heads, num_kv_heads),
        attention_out=_linear(attention.o_proj),
        after_attention=_optional_norm(after),
        before_mlp=_optional_norm(before_mlp),
        gate=gate,
        up=up,
        activation=_activation(mlp),
        down=_linear(mlp.down_proj),
        after_mlp=_optional_norm(getattr(module, "post_feedforward_layernorm", None)),
        residual_scale=getattr(module, "residual_multiplier", 1.0),
    )


def read_norm(module: Any) -> RmsNorm:
    """A stock norm of one of three kinds, which differ in their weight and in where they round."""
    name = type(module).__name__
    weight = module.weight.detach()
    if name.startswith("Gemma"):
        return RmsNorm(weight=1.0 + weight.float(), eps=module.eps)
    if name.startswith("Olmo2"):
        return RmsNorm(weight=weight.float(), eps=module.variance_epsilon)
    return RmsNorm(weight=weight, eps=module.variance_epsilon)


def _optional_norm(module: Any) -> RmsNorm | None:
    return None if module is None else read_norm(module)


def _qk_norm(attention: Any, num_heads: int, num_kv_heads: int) -> RmsNorm | WidthNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    query, key = read_norm(attention.q_norm), read_norm(attention.k_norm)
    if query.weight.numel() != attention.head_dim:
        return WidthNorm(query=query, key=key, num_heads=num_heads)
    weights = [query.weight.expand(num_heads, -1), key.weight.expand(num_kv_heads, -1)]
    return RmsNorm(weight=torch.cat(weights), eps=query.eps)


def _activation(mlp: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    activation: nn.Module = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    if isinstance(activation, nn.SiLU):
        # In place: fresh memory for a chunk's rows costs more than the function itself.
        return torch.nn.SiLU(inplace=True)
    return activation


def _qkv(attention: Any) -> Linear:
    if hasattr(attention, "qkv_proj"):
        return _linear(attention.qkv_proj)
    parts: list[nn.Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases: list[torch.Tensor | None] = [part.bias for part in parts]
    fused = Linear(
        weight=torch.cat([part.weight.detach() for part in parts]),
        bias=torch.cat([bias.detach() for bias in biases if bias is not None])
        if biases[0] is not None
        else None,
    )
    shares = [part.out_features for part in parts]
    for part, weight in zip(parts, torch.split(fused.weight, shares), strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)
    if fused.bias is not None:
        for part, bias in zip(parts, torch.split(fused.bias, shares), strict=True):
            part.bias = nn.Parameter(bias, requires_grad=False)
    return fused


def _gate_up(mlp: Any) -> tuple[Linear, Linear]:
    if not hasattr(mlp, "gate_up_proj"):
        return _linear(mlp.gate_proj), _linear(mlp.up_proj)
    both = _linear(mlp.gate_up_proj)
    gate, up = both.weight.chunk(2)
    gate_bias, up_bias = (None, None) if both.bias is None else both.bias.chunk(2)
    return Linear(weight=gate, bias=gate_bias), Linear(weight=up, bias=up_bias)


def _linear(module: nn.Linear) -> Linear:
    bias: torch.Tensor | None = module.bias
    return Linear(weight=module.weight.detach(), bias=None if bias is None else bias.detach())
