"""One NVIDIA GPU by what torch ships. Written after torch 2.13's sources; NOT RUN so far.

The handle of a pool is what `torch.multiprocessing` sends between processes: CUDA's IPC handle of
the allocation, where in it the pool begins, and the file in which torch counts who still maps it,
so that the memory outlives its owner's interest for as long as a reader has it. One handle serves
all readers: their count matters to memory that is freed before its process ends, which no pool is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kv_transfer.geometry import BlockId
from kv_transfer.transports.device import DeviceMemory

__all__ = ["CudaDevice"]

_BYTES = ("handle", "ref_counter", "event")
_NUMBERS = ("size_bytes", "offset_bytes", "ref_counter_offset", "num_bytes")


class CudaDevice:
    """`Device` of one GPU."""

    def __init__(self, index: int = 0) -> None:
        """The GPU of this index among those that the process sees."""
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def uuid(self) -> str:
        """The GPU's name, the same in every process."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """On a stream of its own, which is waited for."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Of the stream's own: what steps have freed may still be in use by them."""
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def share(self, memory: DeviceMemory) -> bytes:
        """JSON of what torch needs on the other side, and the GPU's name."""
        arena: Any = memory.tensor(BlockId(0)).untyped_storage()
        (_, handle, size_bytes, offset_bytes, counter, counter_offset, event, must_wait) = (
            arena._share_cuda_()
        )
        return json.dumps(
            {
                "gpu": self.uuid,
                "handle": handle.hex(),
                "ref_counter": counter.hex(),
                "event": event.hex(),
                "must_wait": must_wait,
                "size_bytes": size_bytes,
                "offset_bytes": offset_bytes,
                "ref_counter_offset": counter_offset,
                "num_bytes": memory.num_blocks * memory.bytes_per_block,
            }
        ).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        """Map it on this GPU, which must be the owner's."""
        found = _read_handle(handle)
        if found["gpu"] != self.uuid:
            raise ValueError(f"the pool is on GPU {found['gpu']}, this worker on {self.uuid}")
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            self._device.index,
            found["handle"],
            found["size_bytes"],
            found["offset_bytes"],
            found["ref_counter"],
            found["ref_counter_offset"],
            found["event"],
            found["must_wait"],
        )
        pool = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return pool[: found["num_bytes"]]


def _read_handle(handle: bytes) -> dict[str, Any]:
    """Inverse of what `share` gives; ValueError for anything else."""
    found: Any = json.loads(handle)
    try:
        read = {name: bytes.fromhex(found[name]) for name in _BYTES}
        numbers = {name: int(found[name]) for name in _NUMBERS}
        return {**read, **numbers, "gpu": str(found["gpu"]), "must_wait": bool(found["must_wait"])}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a handle: {error!r}") from error
