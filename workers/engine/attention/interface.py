"""The seam to transformers: leads the attention of a model's own modules to a handler of ours.

transformers looks attention up by a name in the model's configuration, in registries of the whole
process. What is registered here holds no state: it finds its handler in the context of the forward
pass that is running, so that several runners, even of one model, can run in several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engine.attention.backend import IntArray, LayerScoring
from workers.errors import UnsupportedModelError

__all__ = ["AttentionHandler", "MaskFunction", "packed_forward", "use_packed_attention"]

_NAME = "baton_packed"

MaskFunction = Callable[..., torch.Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key; broadcasts."""


class AttentionHandler(Protocol):
    """What one forward pass does for its attention layers."""

    def mask(self, mask_function: MaskFunction) -> torch.Tensor | None:
        """The `mask` that the layers of one kind are to be called with."""

    def attend(
        self,
        layer_index: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """Attention of a layer: q, k, v `[num_tokens, (kv_)heads, head_dim]` -> like q.

        v, and the result, may be of another width than q and k.
        """


# Keyword arguments would be the plainer way to hand it over, but some models drop them.
_handler: ContextVar[AttentionHandler] = ContextVar("baton_attention_handler")


def use_packed_attention(model: torch.nn.Module) -> None:
    """Make the model's attention layers ask `packed_forward`'s handler; safe to repeat.

    A model whose class does not look attention up is left as it is, with a line in the log.
    """
    AttentionInterface.register(_NAME, _attend)
    # Without a mask function of the same name, models may build a mask of num_tokens squared.
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)  # type: ignore[operator]


def packed_forward(
    model: torch.nn.Module,
    handler: AttentionHandler,
    input_ids: IntArray,
    positions: IntArray,
    rows: IntArray,
) -> torch.Tensor:
    """Logits `[len(rows), vocabulary]` of some rows of one forward pass over all of them.

    The rows go through the model as one sequence `[1, num_tokens]`, without a cache or a mask. With
    no rows asked for, the head has nothing to multiply.
    """
    device: torch.device = model.device  # type: ignore[assignment]
    token = _handler.set(handler)
    try:
        with torch.inference_mode():
            output = model(
                input_ids=torch.from_numpy(input_ids).unsqueeze(0).to(device),
                position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(rows).to(device),
            )
    finally:
        _handler.reset(token)
    logits: torch.Tensor = output.logits[0]
    return logits


def _by_row(heads_first: torch.Tensor) -> torch.Tensor:
    """A view `[num_tokens, heads, head_dim]` of `[1, heads, num_tokens, head_dim]`."""
    return heads_first.squeeze(0).transpose(0, 1)


def _mask(*, mask_function: MaskFunction, **_others: Any) -> torch.Tensor | None:
    return _handler.get().mask(mask_function)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The signature of transformers; q, k, v are `[1, heads, num_tokens, head_dim]`."""
    layer_index = getattr(module, "layer_idx", None)
    if layer_index is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is")
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} adds a bias to its attention scores")
    attended = _handler.get().attend(
        layer_index,
        (_by_row(query), _by_row(key), _by_row(value)),
        attention_mask,
        LayerScoring(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        ),
    )
    return attended.unsqueeze(0), None
