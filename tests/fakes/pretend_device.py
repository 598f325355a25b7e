"""A device that is none: tensors on it are computed on the CPU, and mix with no CPU tensor.

What a GPU is to code that makes tensors, for tests without one: whatever is made or moved there is
a `PretendTensor`, an operation with tensors of both sorts fails as it would on a GPU, and none of
them has an address in this process. It is called `meta`, since torch starts a driver before it
makes anything on a device of a name that needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")

_COPIES = frozenset({"copy_", "_to_copy", "lift_fresh"})
"""What may have one tensor here and one there."""
_ITEMS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class PretendTensor(torch.Tensor):
    """A tensor on the device; its numbers are in a CPU tensor."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> PretendTensor:
        # A view of a tensor is of its sort, whatever mode it is taken in.
        with torch.inference_mode(False):
            tensor: PretendTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=DEVICE,
            )
        tensor.numbers = numbers
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist:  # the one way out that torch refuses to subclasses
            return args[0].numbers.tolist()
        if func in _ITEMS and isinstance(args[1], list):  # which torch makes a tensor of by itself
            index = PretendTensor(torch.tensor(args[1], dtype=torch.int64))
            args = (args[0], index, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():  # which would make all results of this class
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """While it is entered, `DEVICE` is there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        with PretendDevice():
            return func.decompose(*args, **kwargs)  # inference mode leaves them whole
    name = func.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = {id(leaf.numbers): leaf for leaf in tensors if isinstance(leaf, PretendTensor)}
    here = [leaf for leaf in tensors if not isinstance(leaf, PretendTensor) and leaf.dim()]
    if there and here and name not in _COPIES:
        raise RuntimeError(f"{func}: tensors on two devices")
    is_result_there = bool(there)
    if kwargs.get("device") is not None:
        is_result_there = torch.device(kwargs["device"]) == DEVICE
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif name == "copy_":
        is_result_there = isinstance(args[0], PretendTensor)
    result = func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_result_there:
            return value
        known = there.get(id(value))
        return PretendTensor(value) if known is None else known

    return tree_map(placed, result)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, PretendTensor) else value
