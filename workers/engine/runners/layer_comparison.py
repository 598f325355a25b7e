"""Our own decoder beside the stock modules, a layer at a time.

Each layer is given what the stock one was given, so that rounding does not add up from layer to
layer. It does in the logits: in 16 bits those of a trained model of 30 layers change by a tenth
from one right way of computing them to another, which hides a scale that is a few percent off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kv_transfer.geometry import KVLayout
from workers.engine.attention.backend import AttentionBackend
from workers.engine.runners.comparison import Reference, packed_logits
from workers.engine.runners.llama_shaped import LlamaShapedDecoder, LlamaShapedForward
from workers.engine.runners.stock import StockForward
from workers.errors import UnsupportedModelError

__all__ = ["compare_layers"]

_ROUNDINGS = 2
"""Steps of the dtype that right ways of computing a part may be apart. Seen were at most 1.2, over
random models of all families and SmolLM2, in both 16-bit dtypes; in bfloat16 a part that is 2 % too
large is 2.3 and more apart, attention that is 5 % too sharp 1.6 (Gemma 2) to 4."""
_FP32_CHANGE = 1e-3
"""In fp32, where rounding is far below what a mistake would make."""
_KEPT_SHARE = 0.1
"""Of a hidden row, counted beside what a layer adds to it: where that is little, the sum's own
rounding is much of it."""


def compare_layers(
    model: Any, decoder: LlamaShapedDecoder, reference: Reference, layout: KVLayout
) -> None:
    """Run the reference's sequences through the stock modules and through the decoder, both packed.

    Raises `UnsupportedModelError` where a layer, or what comes before or after all layers, is not
    what the stock one computes.
    """
    stock, own = _Rows(len(decoder.layers)), _Rows(len(decoder.layers))

    def follow(place: int, hidden: torch.Tensor) -> None:
        step = own.add(place, hidden)
        hidden.copy_(stock.of_step(place, step))

    def make(backend: AttentionBackend) -> LlamaShapedForward:
        return LlamaShapedForward(decoder, backend, follow)

    with _watched(model.model, stock):
        expected = packed_logits(lambda backend: StockForward(model, backend), reference, layout)
    logits = packed_logits(make, reference, layout)
    tolerance = max(_FP32_CHANGE, _ROUNDINGS * torch.finfo(model.dtype).eps)
    for part, change in _changes(stock, own, torch.cat(expected), torch.cat(logits)):
        if not change <= tolerance:
            raise UnsupportedModelError(
                f"{part} of the decoder differs by {change:.2%} from that of the stock modules"
            )


def _changes(
    stock: _Rows, own: _Rows, expected: torch.Tensor, logits: torch.Tensor
) -> Iterator[tuple[str, float]]:
    """Each part of the decoder, and how far what it computed is from the stock one."""
    yield "the embedding", _change(stock.at(0), own.at(0))
    for index in range(stock.num_layers):
        after = index + 1
        yield f"layer {index}", _change(stock.at(after), own.at(after), stock.at(index))
    yield "the head", _change(expected, logits)


class _Rows:
    """The hidden rows before each layer and before the last norm, step after step."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._by_place: list[list[torch.Tensor]] = [[] for _ in range(num_layers + 1)]

    def add(self, place: int, hidden: torch.Tensor) -> int:
        """Keep a copy of rows `[num_tokens, width]`; returns the number of their step."""
        self._by_place[place].append(hidden.clone())
        return len(self._by_place[place]) - 1

    def of_step(self, place: int, step: int) -> torch.Tensor:
        """Rows of one step."""
        return self._by_place[place][step]

    def at(self, place: int) -> torch.Tensor:
        """Rows of all steps."""
        return torch.cat(self._by_place[place])


@contextmanager
def _watched(body: Any, rows: _Rows) -> Iterator[None]:
    """Keep what the stock layers and the last norm are given."""

    def note(place: int) -> Callable[..., None]:
        def see(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rows.add(place, hidden[0])

        return see

    hooks = [
        module.register_forward_pre_hook(note(place), with_kwargs=True)
        for place, module in enumerate((*body.layers, body.norm))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _change(stock: torch.Tensor, own: torch.Tensor, before: torch.Tensor | None = None) -> float:
    """Size of the difference over that of what was added to the rows before; NaN stays NaN.

    By column, of which the median: trained models have columns, and first tokens, that are a
    thousand times as large as all else, and so is their rounding.
    """
    stock, own = stock.float(), own.float()
    added = stock if before is None else stock - before.float()
    size = added.norm(dim=0) + _KEPT_SHARE * stock.norm(dim=0)
    return float(((stock - own).norm(dim=0) / size.clamp(min=1e-6)).median())
