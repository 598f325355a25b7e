"""Proof at load that a model can be run packed: else it is refused, never silently wrong.

Packing the rows of several sequences is right for most transformers models and quietly wrong for
some: those that keep a state besides K and V, that compute attention without the interface, whose
masks are not causal, or whose rotary frequencies depend on the longest sequence around. No list of
names can know them; so a model is watched at work and compared with its own stock attention.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from kv_transfer.geometry import KVLayout
from workers.engine.attention.backend import IntArray, LayerScoring
from workers.engine.attention.interface import MaskFunction, packed_forward, use_packed_attention
from workers.engine.runners.comparison import (
    Reference,
    compare,
    relative_change,
    stock_reference,
    token_ids,
)
from workers.engine.runners.stock import StockForward
from workers.errors import UnsupportedModelError

__all__ = ["CheckedModel", "check_model"]

_NUM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedModel:
    """What was learned of a model that can be run packed."""

    scorings: tuple[LayerScoring, ...]
    """By layer, what it asks of its attention."""
    reference: Reference
    """What its own attention computes, for comparing other ways of running it."""


def check_model(model: torch.nn.Module, layout: KVLayout, *, max_model_len: int) -> CheckedModel:
    """Return if the model can be run packed over pools like `layout`, up to max_model_len tokens.

    Raises `UnsupportedModelError`, which names the architecture and the reason. Takes about ten
    forward passes of a few tokens, and leaves the model set to packed attention.
    """
    try:
        _check_signature(model)
        use_packed_attention(model)
        scorings = _check_layers(model, layout)
        _check_masks(model, layout, max_model_len)
        _check_positions(model, max_model_len)
        reference = stock_reference(model)
        compare(lambda backend: StockForward(model, backend), reference, layout)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {error}") from error
    except Exception as error:  # whatever a foreign model raises here, it would raise in service
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: its forward pass raised {error!r}"
        ) from error
    return CheckedModel(scorings=scorings, reference=reference)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """What a layer asked of its attention."""

    layer_index: int
    query: torch.Tensor
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask: torch.Tensor | None
    scoring: LayerScoring


class _Probe:
    """An `AttentionHandler` that attends to nothing and notes how it was called.

    The masks that it gives out are filled with the place of their function in `mask_functions`, so
    that it shows which mask ends up at which layer.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._device = device
        self.mask_functions: list[MaskFunction] = []
        self.calls: list[_Call] = []

    def mask(self, mask_function: MaskFunction) -> torch.Tensor:
        """See `AttentionHandler.mask`."""
        self.mask_functions.append(mask_function)
        shape = (1, 1, self._num_tokens, self._num_tokens)
        return torch.full(shape, float(len(self.mask_functions) - 1), device=self._device)

    def attend(
        self,
        layer_index: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        scoring: LayerScoring,
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
                scoring=scoring,
            )
        )
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def _check_signature(model: torch.nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            raise UnsupportedModelError(f"its forward pass takes no {name}")


def _check_layers(model: torch.nn.Module, layout: KVLayout) -> tuple[LayerScoring, ...]:
    """Every layer attends once, with keys and values that fit the layout; how, by layer."""
    calls = _probe(model, np.arange(_NUM_TOKENS)).calls
    if not calls:
        raise UnsupportedModelError("its attention does not go through transformers' interface")
    found = Counter(call.layer_index for call in calls)
    if found != Counter(range(layout.num_layers)):
        raise UnsupportedModelError(
            f"each of its {layout.num_layers} layers should attend once; "
            f"times by layer: {dict(sorted(found.items()))}"
        )
    for call in calls:
        *rows, key_dim = call.key_shape
        *value_rows, value_dim = call.value_shape
        expected = [_NUM_TOKENS, layout.num_kv_heads]
        if not rows == value_rows == expected or max(key_dim, value_dim) != layout.head_dim:
            raise UnsupportedModelError(
                f"layer {call.layer_index} has keys {call.key_shape} and values "
                f"{call.value_shape}, the KV layout {(*expected, layout.head_dim)}"
            )
    return tuple(call.scoring for call in sorted(calls, key=lambda call: call.layer_index))


def _check_masks(model: torch.nn.Module, layout: KVLayout, max_model_len: int) -> None:
    """Every layer's mask is causal, within a window that its attention is told of and blocks keep.

    Masks are functions of positions, so this holds for the whole window, at the cost of few tokens.
    """
    probe = _probe(model, np.arange(_NUM_TOKENS))
    kept = {layer: group.sliding_window for group in layout.groups for layer in group.layers}
    for call in probe.calls:
        seen, window = call.scoring.sliding_window, kept[call.layer_index]
        if window is not None and (seen is None or seen > window):
            raise UnsupportedModelError(
                f"layer {call.layer_index} attends with sliding_window={seen}, the KV layout keeps "
                f"{window} tokens for it"
            )
        if call.mask is None:
            raise UnsupportedModelError(f"layer {call.layer_index} does not ask for a mask")
        mask_function = probe.mask_functions[int(call.mask.flatten()[0])]
        if not _is_causal(mask_function, call.scoring.sliding_window, max_model_len):
            raise UnsupportedModelError(
                f"the mask of layer {call.layer_index} is not the causal one with "
                f"sliding_window={call.scoring.sliding_window} that its attention is told of"
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
        change = relative_change(call.query[:-1], other.query[:-1])
        if not change <= 1e-3:
            raise UnsupportedModelError(
                f"the queries of layer {call.layer_index} change by {change:.1%} when a sequence "
                f"of {max_model_len} tokens is in the batch"
            )


def _probe(model: torch.nn.Module, positions: IntArray) -> _Probe:
    probe = _Probe(len(positions), model.device)  # type: ignore[arg-type]
    ids = token_ids(model, len(positions), seed=1)
    packed_forward(model, probe, ids, positions, np.arange(1))
    return probe
