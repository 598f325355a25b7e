"""A real model behind `tests.fakes.worker_rig`: runners of its own, each with its own pool."""

from __future__ import annotations

import torch

from kv_transfer.geometry import KVLayout
from tests.fakes.worker_rig import ModelFactory
from workers.engine.attention.torch_cpu import TorchCpuBackend
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.stock import StockForward


def paged(model: torch.nn.Module, layout: KVLayout) -> ModelFactory:
    """Runners that share the model; every element of a pool is NaN until it is written."""

    def make(num_blocks: int) -> tuple[RaggedModelRunner, KVCache]:
        kv_cache = KVCache(layout, num_blocks, poison=True)
        backend = TorchCpuBackend(kv_cache)
        return RaggedModelRunner(
            StockForward(model, backend), block_size=layout.block_size
        ), kv_cache

    return make
