"""Attention of one sequence written out: the path for what fused kernels do not know.

Slower than a fused kernel, and right for every combination of window, softcap and sinks.
"""

from __future__ import annotations

import torch

__all__ = ["causal_bias", "masked_attention"]


def causal_bias(
    query_length: int,
    seq_len: int,
    sliding_window: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """0 where the last query_length of seq_len tokens see a token, else -inf: `[queries, tokens]`.

    With a window of w, a token sees itself and the w - 1 tokens before it.
    """
    own = torch.arange(seq_len - query_length, seq_len, device=device).unsqueeze(1)
    other = torch.arange(seq_len, device=device)
    seen = other <= own
    if sliding_window is not None:
        seen &= other > own - sliding_window
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with q `[heads, queries, head_dim]` over k, v `[kv_heads, tokens, head_dim]`.

    `bias` `[queries, tokens]` is added to the scores; the softmax is taken in fp32; the result has
    q's shape.
    """
    num_kv_heads = len(k)
    grouped = q.reshape(num_kv_heads, -1, *q.shape[1:])
    scores = torch.matmul(grouped, k.transpose(1, 2).unsqueeze(1)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        columns = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, columns], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v.dtype), v.unsqueeze(1)).flatten(0, 1)
