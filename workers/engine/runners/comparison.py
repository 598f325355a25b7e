"""Packed against alone: whether a forward pass computes what the model's own attention does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch

from kv_transfer.geometry import BlockId, KVLayout
from workers.engine.attention.backend import AttentionBackend, IntArray, build_metadata
from workers.engine.attention.interface import use_packed_attention
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.block_table import BlockTable
from workers.engine.kv_cache import KVCache
from workers.engine.runners.forward import ForwardPass
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.errors import UnsupportedModelError

__all__ = [
    "Reference",
    "compare",
    "packed_logits",
    "relative_change",
    "stock_reference",
    "token_ids",
]

_STEPS = (((0, 11), (0, 5)), ((11, 12), (5, 9)), ((12, 13), (9, 15)), ((13, 14), (15, 16)))
"""By step, (start, end) of either sequence: whole and chunked prefill, decode, and both mixed."""
_NUM_TOKENS = 16
_BLOCK_SIZE = 4
"""Small, so that few tokens span several blocks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """Two sequences, and what a model makes of each alone, with its own attention and no pages."""

    tokens: tuple[IntArray, ...]
    logits: tuple[torch.Tensor, ...]
    """Of each sequence `[tokens, vocabulary]`."""


def stock_reference(model: torch.nn.Module) -> Reference:
    """The reference of a model, which is left set to packed attention."""
    tokens = tuple(token_ids(model, end, seed) for seed, (_, end) in enumerate(_STEPS[-1]))
    device: torch.device = model.device  # type: ignore[assignment]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with torch.inference_mode():
            logits = tuple(
                model(
                    input_ids=torch.from_numpy(ids).unsqueeze(0).to(device), use_cache=False
                ).logits[0]
                for ids in tokens
            )
    finally:
        use_packed_attention(model)
    return Reference(tokens=tokens, logits=logits)


def compare(
    make_forward: Callable[[AttentionBackend], ForwardPass],
    reference: Reference,
    layout: KVLayout,
) -> None:
    """Run the two sequences packed, in chunks, over blocks like the layout's.

    Raises `UnsupportedModelError` where the logits are not those of the reference.
    """
    # In 16 bits a trained model's logits change by 10 % from one of its own kernels to another; to
    # see another sequence's tokens, or to miss its own, changes them by 70 % and more. What changes
    # them less is seen in fp32 only; of our own decoder `layer_comparison` sees it in 16 bits too.
    tolerance = 1e-3 if layout.element_bytes == 4 else 0.3
    packed = packed_logits(make_forward, reference, layout)
    for ours, stock in zip(packed, reference.logits, strict=True):
        change = fmean(relative_change(*rows) for rows in zip(stock, ours, strict=True))
        if not change <= tolerance:
            raise UnsupportedModelError(
                f"packed with another sequence its logits differ by {change:.1%} from those of "
                "its own attention"
            )


def packed_logits(
    make_forward: Callable[[AttentionBackend], ForwardPass],
    reference: Reference,
    layout: KVLayout,
) -> list[torch.Tensor]:
    """All logits of the two sequences, each `[tokens, vocabulary]`, computed together in steps."""
    tokens = reference.tokens
    layout = replace(layout, block_size=_BLOCK_SIZE)
    blocks = layout.blocks_for(_NUM_TOKENS)
    # NaN in what was not written: a read beyond a sequence cannot go unseen.
    num_groups = len(layout.groups)
    kv_cache = KVCache(layout, 2 * num_groups * blocks, reference.logits[0].device, poison=True)
    forward = make_forward(TorchBackend(kv_cache))
    parts: list[list[torch.Tensor]] = [[], []]
    for step_id, spans in enumerate(_STEPS):
        plan = StepPlan(
            step_id=step_id,
            sequences=tuple(
                ScheduledSequence(
                    sequence_id=SequenceId(i),
                    token_ids=tuple(tokens[i][start:end].tolist()),
                    start=start,
                    block_tables=_tables(i, num_groups, blocks),
                    sampling=None,
                )
                for i, (start, end) in enumerate(spans)
            ),
        )
        logits = forward.logits(build_metadata(plan, _BLOCK_SIZE), np.arange(plan.num_tokens))
        first_length = spans[0][1] - spans[0][0]
        parts[0].append(logits[:first_length].float())
        parts[1].append(logits[first_length:].float())
    return [torch.cat(part) for part in parts]


def _tables(sequence: int, num_groups: int, blocks: int) -> tuple[BlockTable, ...]:
    """Whole tables of one of two sequences, none of them in the order of the pool."""
    return tuple(
        BlockTable(
            block_ids=tuple(
                BlockId(2 * (j * num_groups + group) + sequence) for j in reversed(range(blocks))
            )
        )
        for group in range(num_groups)
    )


def token_ids(model: torch.nn.Module, count: int, seed: int) -> IntArray:
    """Random token ids of the model's vocabulary `[count]`."""
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return np.random.default_rng(seed).integers(0, vocabulary, count)


def relative_change(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Size of the difference over the size of the reference about its mean; NaN stays NaN."""
    reference = reference.float()
    size = (reference - reference.mean()).norm().clamp(min=1e-6)
    return float((reference - other).norm() / size)
