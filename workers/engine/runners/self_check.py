"""Proof at load that a model can be run packed: else it is refused, never silently wrong.

Packing the rows of several sequences is right for most transformers models and quietly wrong for
some: those that keep a state besides K and V, that compute attention without the interface, whose
masks are not causal, or whose rotary frequencies depend on the longest sequence around. No list of
names can know them; so a model is watched at work and compared with its own stock attention.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch

from kv_transfer.geometry import BlockId, KVLayout
from workers.engine.attention.backend import IntArray, build_metadata
from workers.engine.attention.interface import MaskFunction, packed_forward, use_packed_attention
from workers.engine.attention.torch_cpu import TorchCpuBackend
from workers.engine.kv_cache import KVCache
from workers.engine.runners.stock import StockForward
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.errors import UnsupportedModelError

__all__ = ["check_model"]

_NUM_TOKENS = 16
_STEPS = (((0, 11), (0, 5)), ((11, 12), (5, 9)), ((12, 13), (9, 15)), ((13, 14), (15, 16)))
"""By step, (start, end) of either sequence: whole and chunked prefill, decode, and both mixed."""
_BLOCK_SIZE = 4
"""Small, so that few tokens span several blocks."""


def check_model(model: torch.nn.Module, layout: KVLayout, *, max_model_len: int) -> None:
    """Return if the model can be run packed over pools like `layout`, up to max_model_len tokens.

    Raises `UnsupportedModelError`, which names the architecture and the reason. Takes about ten
    forward passes of a few tokens, and leaves the model set to packed attention.
    """
    try:
        _check_signature(model)
        use_packed_attention(model)
        _check_layers(model, layout)
        _check_masks(model, max_model_len)
        _check_positions(model, max_model_len)
        _check_logits(model, layout)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {error}") from error
    except Exception as error:  # whatever a foreign model raises here, it would raise in service
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: its forward pass raised {error!r}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """What a layer asked of its attention."""

    layer_index: int
    query: torch.Tensor
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask: torch.Tensor | None
    sliding_window: int | None


class _Probe:
    """An `AttentionHandler` that attends to nothing and notes how it was called.

    The masks that it gives out are filled with the place of their function in `mask_functions`, so
    that it shows which mask ends up at which layer.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.mask_functions: list[MaskFunction] = []
        self.calls: list[_Call] = []

    def mask(self, mask_function: MaskFunction) -> torch.Tensor:
        """See `AttentionHandler.mask`."""
        self.mask_functions.append(mask_function)
        shape = (1, 1, self._num_tokens, self._num_tokens)
        return torch.full(shape, float(len(self.mask_functions) - 1))

    def attend(
        self,
        layer_index: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionHandler.attend`."""
        query, key, value = qkv
        self.calls.append(
            _Call(
                layer_index=layer_index,
                query=query.float(),
                key_shape=tuple(key.shape),
                value_shape=tuple(value.shape),
                mask=mask,
                sliding_window=sliding_window,
            )
        )
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def _check_signature(model: torch.nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            raise UnsupportedModelError(f"its forward pass takes no {name}")


def _check_layers(model: torch.nn.Module, layout: KVLayout) -> None:
    """Every layer attends once, with keys and values as the layout has them."""
    calls = _probe(model, np.arange(_NUM_TOKENS)).calls
    if not calls:
        raise UnsupportedModelError("its attention does not go through transformers' interface")
    found = Counter(call.layer_index for call in calls)
    if found != Counter(range(layout.num_layers)):
        raise UnsupportedModelError(
            f"each of its {layout.num_layers} layers should attend once; "
            f"times by layer: {dict(sorted(found.items()))}"
        )
    expected = (_NUM_TOKENS, layout.num_kv_heads, layout.head_dim)
    for call in calls:
        if (call.key_shape, call.value_shape) != (expected, expected):
            raise UnsupportedModelError(
                f"layer {call.layer_index} has keys {call.key_shape} and values "
                f"{call.value_shape}, the KV layout {expected}"
            )


def _check_masks(model: torch.nn.Module, max_model_len: int) -> None:
    """Every layer's mask is causal, within the window that the layer tells its attention of.

    Masks are functions of positions, so this holds for the whole window, at the cost of few tokens.
    """
    probe = _probe(model, np.arange(_NUM_TOKENS))
    for call in probe.calls:
        if call.mask is None:
            raise UnsupportedModelError(f"layer {call.layer_index} does not ask for a mask")
        mask_function = probe.mask_functions[int(call.mask.flatten()[0])]
        if not _is_causal(mask_function, call.sliding_window, max_model_len):
            raise UnsupportedModelError(
                f"the mask of layer {call.layer_index} is not the causal one with "
                f"sliding_window={call.sliding_window} that its attention is told of"
            )


def _is_causal(mask_function: MaskFunction, window: int | None, max_model_len: int) -> bool:
    edges = [] if window is None else [window - 1, window, window + 1]
    own = torch.tensor(sorted({0, 1, *edges, max_model_len - 1})).view(1, 1, -1, 1)
    own = own.clamp(0, max_model_len - 1)
    other = torch.arange(max_model_len).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    expected = other <= own
    if window is not None:
        expected &= other > own - window
    return torch.equal(mask_function(zero, zero, own, other).expand_as(expected), expected)


def _check_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """A row's queries do not depend on how far another sequence in the step has come."""
    near = np.arange(_NUM_TOKENS)
    alone = _probe(model, near).calls
    near[-1] = max_model_len - 1
    beside = _probe(model, near).calls
    for call, other in zip(alone, beside, strict=True):
        change = _relative_change(call.query[:-1], other.query[:-1])
        if not change <= 1e-3:
            raise UnsupportedModelError(
                f"the queries of layer {call.layer_index} change by {change:.1%} when a sequence "
                f"of {max_model_len} tokens is in the batch"
            )


def _check_logits(model: torch.nn.Module, layout: KVLayout) -> None:
    """Two sequences packed, in chunks, over paged KV, get what either gets alone and unpaged."""
    # In 16 bits a trained model's logits change by 10 % from one of its own kernels to another; to
    # see another sequence's tokens, or to miss its own, changes them by 70 % and more.
    tolerance = 1e-3 if layout.element_bytes == 4 else 0.3
    tokens = [_token_ids(model, end, seed) for seed, (_, end) in enumerate(_STEPS[-1])]
    packed = _packed_logits(model, layout, tokens)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        with torch.inference_mode():
            alone = [
                model(input_ids=torch.from_numpy(ids).unsqueeze(0), use_cache=False).logits[0]
                for ids in tokens
            ]
    finally:
        use_packed_attention(model)
    for ours, stock in zip(packed, alone, strict=True):
        change = fmean(_relative_change(*rows) for rows in zip(stock, ours, strict=True))
        if not change <= tolerance:
            raise UnsupportedModelError(
                f"packed with another sequence its logits differ by {change:.1%} from those of "
                "its own attention"
            )


def _packed_logits(
    model: torch.nn.Module, layout: KVLayout, tokens: list[IntArray]
) -> list[torch.Tensor]:
    """All logits of two sequences `[tokens, vocabulary]`, computed together over `_STEPS`."""
    layout = replace(layout, block_size=_BLOCK_SIZE)
    blocks = layout.blocks_for(_NUM_TOKENS)
    # NaN in what was not written: a read beyond a sequence cannot go unseen.
    kv_cache = KVCache(layout, 2 * blocks, poison=True)
    forward = StockForward(model, TorchCpuBackend(kv_cache))
    parts: list[list[torch.Tensor]] = [[], []]
    for step_id, spans in enumerate(_STEPS):
        plan = StepPlan(
            step_id=step_id,
            sequences=tuple(
                ScheduledSequence(
                    sequence_id=SequenceId(i),
                    token_ids=tuple(tokens[i][start:end].tolist()),
                    start=start,
                    block_ids=tuple(BlockId(2 * j + i) for j in reversed(range(blocks))),
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


def _probe(model: torch.nn.Module, positions: IntArray) -> _Probe:
    probe = _Probe(len(positions))
    ids = _token_ids(model, len(positions), seed=1)
    packed_forward(model, probe, ids, positions, np.arange(1))
    return probe


def _token_ids(model: torch.nn.Module, count: int, seed: int) -> IntArray:
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return np.random.default_rng(seed).integers(0, vocabulary, count)


def _relative_change(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Size of the difference over the size of the reference about its mean; NaN stays NaN."""
    reference = reference.float()
    size = (reference - reference.mean()).norm().clamp(min=1e-6)
    return float((reference - other).norm() / size)
