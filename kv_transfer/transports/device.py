"""The seam to a GPU's memory, as transports need it: blocks as tensors, and five calls.

Whatever a transport does with a pool on a device it does by these; tests have a stand-in that is
host memory of two processes. `cuda_device` is the real one, and was not run so far.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch
from torch.nn.functional import pad

from kv_transfer.geometry import BlockId
from kv_transfer.transport import BlockMemory

__all__ = [
    "Device",
    "DeviceMemory",
    "block_content",
    "block_tensor",
    "block_work",
    "device_memory",
    "fingerprint",
]


class DeviceMemory(BlockMemory, Protocol):
    """A pool whose blocks have no address in this process."""

    def tensor(self, block_id: BlockId) -> torch.Tensor:
        """A block's bytes where they are: uint8 `[bytes_per_block]`, a view.

        IndexError if there is no such block.
        """


class Device(Protocol):
    """A GPU; used by the transfer thread, but for `memory`, which any thread may ask for.

    What raises anything else than is said has broken the GPU for this process, which is not to go
    on.
    """

    def apart(self) -> AbstractContextManager[None]:
        """What is asked of the device within waits for no step, and is done when it is left."""

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Memory on the device, with anything in it: uint8 `[num_bytes]`. It waits for nothing.

        torch.OutOfMemoryError if there is none left.
        """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies to and from at its best: uint8 `[num_bytes]`."""

    def share(self, memory: DeviceMemory) -> bytes:
        """A handle by which another process of this host can `open` all of its blocks."""

    def open(self, handle: bytes) -> torch.Tensor:
        """Another process's blocks, one after the other: uint8 `[num_blocks * bytes_per_block]`.

        They are mapped for as long as the tensor lives. ValueError for what is no handle, or one of
        another GPU; RuntimeError if it cannot be mapped.
        """


def device_memory(memory: BlockMemory) -> DeviceMemory:
    """A pool as what it is; ValueError if it is in host memory."""
    if memory.kind == "host":
        raise ValueError("the pool is in host memory")
    return cast(DeviceMemory, memory)


def block_tensor(memory: BlockMemory, block_id: BlockId) -> torch.Tensor:
    """A block's bytes wherever they are: uint8 `[bytes_per_block]`, a view."""
    if memory.kind == "host":
        return torch.frombuffer(memory.block(block_id), dtype=torch.uint8)
    return device_memory(memory).tensor(block_id)


def block_content(memory: BlockMemory, block_id: BlockId) -> memoryview:
    """What a block's digest is made of: its bytes; on a device, what identifies them.

    Bytes that would have to come to the host for a digest could as well be sent from there.
    """
    if memory.kind == "host":
        return memory.block(block_id)
    return memoryview(fingerprint(device_memory(memory).tensor(block_id)))


def block_work(memory: BlockMemory) -> int:
    """How long a block takes, in bytes that are copied meanwhile: what `FrameSocket.pace` counts.

    However small it is, a device has to be asked for its fingerprint, and answers some 0.15 ms
    later: so long did it take even where a CPU played its part.
    """
    if memory.kind == "host":
        return memory.bytes_per_block
    return max(memory.bytes_per_block, _LEAST_WORK_BYTES)


_LEAST_WORK_BYTES = 128 * 1024
_STEP = 0x9E37_79B9_7F4A_7C15
_FACTORS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_SHIFTS = (30, 27)
_LAST_SHIFT = 31


def fingerprint(block: torch.Tensor) -> bytes:
    """16 bytes that change with any byte of a uint8 tensor and its place; made on its device.

    The words of 8 bytes, each plus its place times an odd number, are mixed by SplitMix64 (Steele,
    Lea, Flood: "Fast splittable pseudorandom number generators", 2014) and added up; twice, the
    second sum being that of words mixed twice. It finds faults, not forgery.
    """
    missing = -block.numel() % 8
    words = (pad(block, (0, missing)) if missing else block).view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=block.device)
    once = _mix(words + places * _signed(_STEP))
    sums = torch.stack([once.sum(), _mix(once + _signed(_STEP)).sum()])
    return bytes(sums.cpu().numpy().tobytes())


def _mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; arithmetic is modulo 2**64."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, _LAST_SHIFT)


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    """To the right with zeros; torch shifts the sign in, which would lose a bit of the word."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def _signed(number: int) -> int:
    """64 bits as torch has them."""
    return number - (1 << 64) if number >> 63 else number
