"""From a model to a runner over a pool of blocks, refused unless it was seen to be right."""

from __future__ import annotations

from pathlib import Path

import torch

from kv_transfer.geometry import KVLayout
from workers.engine.attention.torch_cpu import TorchCpuBackend
from workers.engine.kv_cache import KVCache, torch_dtype
from workers.engine.linear import pack_head
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.self_check import check_model
from workers.engine.runners.stock import StockForward
from workers.models.loading import ModelInfo, load_weights

__all__ = ["build_runner"]


def build_runner(
    model: Path | torch.nn.Module,
    *,
    info: ModelInfo,
    layout: KVLayout,
    num_blocks: int,
    dtype: torch.dtype,
    threads: int,
    max_model_len: int | None = None,
) -> tuple[RaggedModelRunner, KVCache]:
    """A checked runner and the pool that it reads and writes.

    `model` is a directory, or loaded already, and then is the runner's from here on: its head is
    replaced by a faster one. It computes in `dtype`, as the pool does. The check covers
    max_model_len tokens, by default all that the model can. Sets the process's number of compute
    threads. Raises `UnsupportedModelError` if the model's architecture cannot be
    run this way, `ModelError` if it cannot be loaded.
    """
    if torch_dtype(layout.dtype) != dtype:
        raise ValueError(f"the model computes in {dtype}, its KV layout says {layout.dtype}")
    torch.set_num_threads(threads)
    if isinstance(model, Path):
        model = load_weights(model, dtype=dtype, device="cpu", attn_implementation="eager")
    check_model(model, layout, max_model_len=max_model_len or info.context_length)
    pack_head(model)
    kv_cache = KVCache(layout, num_blocks)
    forward = StockForward(model, TorchCpuBackend(kv_cache))
    return RaggedModelRunner(forward, block_size=layout.block_size), kv_cache
