"""A real model behind `tests.fakes.worker_rig`: runners of its own, each with its own pool."""

from __future__ import annotations

import torch

from kv_transfer.geometry import KVLayout
from kv_transfer.shared_memory import SharedRegion
from tests.fakes.worker_rig import ModelFactory
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.stock import StockForward


def paged(model: torch.nn.Module, layout: KVLayout, *, shared: bool = False) -> ModelFactory:
    """Runners that share the model.

    Every element of a pool is NaN until it is written; in `shared` pools, which the shm transport
    can read, it is zero, as in a worker's.
    """

    def make(num_blocks: int) -> tuple[RaggedModelRunner, KVCache]:
        region = SharedRegion(num_blocks * layout.bytes_per_block) if shared else None
        kv_cache = KVCache(layout, num_blocks, poison=not shared, region=region)
        backend = TorchBackend(kv_cache)
        return RaggedModelRunner(
            StockForward(model, backend), block_size=layout.block_size
        ), kv_cache

    return make
