"""From a model to a runner over a pool of blocks, refused unless it was seen to be right.

The tier is chosen by the configuration; what it computes is compared with the stock model, with the
real weights. Our own decoder gives way to the stock modules where it differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kv_transfer.geometry import KVLayout
from kv_transfer.shared_memory import SharedRegion
from workers.engine.attention.backend import AttentionBackend
from workers.engine.attention.core_aware import CoreAwareBackend, SharedThreads
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.kv_cache import KVCache, torch_dtype
from workers.engine.linear import pack_head
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.forward import ForwardPass
from workers.engine.runners.layer_comparison import compare_layers
from workers.engine.runners.llama_shaped import LlamaShapedDecoder, LlamaShapedForward
from workers.engine.runners.self_check import CheckedModel, check_model
from workers.engine.runners.stock import StockForward
from workers.errors import UnsupportedModelError
from workers.models.loading import ModelInfo, load_weights
from workers.runner_choice import RunnerCause, RunnerChoice, runner_of

__all__ = ["build_runner", "make_forward"]

_logger = logging.getLogger(__name__)

ForwardFactory = Callable[[AttentionBackend], ForwardPass]


def build_runner(
    model: Path | torch.nn.Module,
    *,
    info: ModelInfo,
    layout: KVLayout,
    num_blocks: int,
    threads: int | SharedThreads,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    region: SharedRegion | None = None,
) -> tuple[RaggedModelRunner, KVCache]:
    """A checked runner and the pool that it reads and writes.

    `model` is a directory, or loaded already, and then is the runner's from here on: its head is
    replaced by a faster one, and `make_forward` says how it is run. It computes in the layout's
    dtype on `device`, as the pool does, which lies there, or in `region` if one is given, for other
    processes to read. The check covers max_model_len tokens, by default all that the model can.
    Sets the process's number of compute threads, and before each layer anew where they are shared.
    Raises `UnsupportedModelError` if the model's
    architecture cannot be run this way, `ModelError` if it cannot be loaded.
    """
    torch.set_num_threads(threads if isinstance(threads, int) else threads.count())
    if isinstance(model, Path):
        model = load_weights(
            model, dtype=torch_dtype(layout.dtype), device=device, attn_implementation="eager"
        )
    checked = check_model(model, layout, max_model_len=max_model_len or info.context_length)
    pack_head(model)
    kv_cache = KVCache(layout, num_blocks, device, region=region)
    backend: AttentionBackend = TorchBackend(kv_cache)
    if not isinstance(threads, int):
        backend = CoreAwareBackend(backend, threads)
    make, choice = make_forward(model, checked, layout)
    runner = RaggedModelRunner(
        make(backend), block_size=layout.block_size, settle=kv_cache.settle, choice=choice
    )
    return runner, kv_cache


def make_forward(
    model: torch.nn.Module, checked: CheckedModel, layout: KVLayout
) -> tuple[ForwardFactory, RunnerChoice]:
    """The best forward pass for a model that passed its check, for any backend over such a layout.

    With it which tier it is, and why, which the log says too. With our own decoder some of the
    model's matrices become one, of which its modules keep views.
    """
    config: Any = model.config
    choice = runner_of(config.model_type)
    make: ForwardFactory | None = None
    if choice.tier == "llama_shaped":
        try:
            make = _own_decoder(model, checked, layout)
        except UnsupportedModelError as error:
            _logger.warning("own decoder is not right", exc_info=True)
            choice = _stock("own_differs", str(error))
        except Exception as error:  # the stock modules were just seen to do what this could not
            _logger.warning("own decoder failed", exc_info=True)
            # Clients read it in /v1/models: the rest of it is in the log.
            choice = _stock("own_failed", type(error).__name__)
    _logger.info(
        "runner architecture=%s tier=%s cause=%s reason=%s",
        *(type(model).__name__, choice.tier, choice.cause, choice.reason),
    )
    return make or (lambda backend: StockForward(model, backend)), choice


def _stock(cause: RunnerCause, why: str) -> RunnerChoice:
    reason = f"the decoder of our own failed: {why}"
    return RunnerChoice(tier="stock", cause=cause, reason=reason)


def _own_decoder(model: torch.nn.Module, checked: CheckedModel, layout: KVLayout) -> ForwardFactory:
    """Our own decoder; raises whatever goes wrong, and where it is not right."""
    decoder = LlamaShapedDecoder(model, checked.scorings)

    def make(backend: AttentionBackend) -> ForwardPass:
        return LlamaShapedForward(decoder, backend)

    compare_layers(model, decoder, checked.reference, layout)
    return make
