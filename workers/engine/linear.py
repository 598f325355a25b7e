"""Linear layers with weights laid out for the rows of a decode batch.

torch's own fp32 product of few rows with a weight (2 to 16: a decode batch) runs at half of what
the memory gives. oneDNN's with a weight that was laid out for it once does not: on Zen 3, one
thread, 2 rows take 0.46 of the time, 4 rows 0.6, 16 rows 0.75, one row 0.8, prefill the same.
Half precision is left alone: without instructions for it oneDNN has nothing to offer there.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["PackedLinear", "pack_linears"]

_ROWS_HINT = 16
"""Rows that the layout is chosen for; every number of rows can be multiplied with it."""


class PackedLinear(nn.Module):
    """What an fp32 `nn.Linear` on the CPU computes, for inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        """Take over the weight and the bias; `linear`'s own weight can be dropped afterwards."""
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its plain layout: a copy, for code that looks at it now and then."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows `[..., in_features]` -> `[..., out_features]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return product


def pack_linears(model: nn.Module) -> int:
    """Replace the model's fp32 CPU linear layers, in place, by packed ones; how many were.

    A shared weight (a head tied to the embedding) stays where else it is used. torch does not
    promise the operations that this needs, so that a layer is kept as it is where they are missing
    or give another product.
    """
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (packed := _pack(child)) is not None:
                setattr(module, name, packed)
                num_packed += 1
    return num_packed


@torch.inference_mode()
def _pack(linear: nn.Linear) -> PackedLinear | None:
    if linear.weight.dtype != torch.float32 or linear.weight.device.type != "cpu":
        return None
    try:
        packed = PackedLinear(linear)
        probe = torch.linspace(-1, 1, 2 * linear.in_features).view(2, -1)
        is_same = torch.allclose(packed(probe), linear(probe), rtol=1e-3, atol=1e-3)
    except (AttributeError, RuntimeError):
        return None
    return packed if is_same else None
