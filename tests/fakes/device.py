"""A GPU's part played by host memory that processes share."""

from __future__ import annotations

import json
import mmap
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kv_transfer.geometry import BlockId
from kv_transfer.shared_memory import SharedRegion
from kv_transfer.transport import BlockMemory, MemoryKind
from kv_transfer.transports.device import DeviceMemory


class DeviceBytes:
    """`DeviceMemory` over another memory: a transport that wants its bytes on the host fails."""

    kind: MemoryKind = "cuda"
    region: SharedRegion | None = None

    def __init__(self, memory: BlockMemory) -> None:
        self.num_blocks = memory.num_blocks
        self.bytes_per_block = memory.bytes_per_block
        self.memory = memory

    def block(self, block_id: BlockId) -> memoryview:
        raise TypeError("blocks on a device have no host address")

    def tensor(self, block_id: BlockId) -> torch.Tensor:
        return torch.frombuffer(self.memory.block(block_id), dtype=torch.uint8)


class SharedHostDevice:
    """`Device` whose handle is where this host finds a region's descriptor.

    It fails where a thread does two things apart at once; what is done within is over at once.
    """

    def __init__(self, name: str = "GPU-0") -> None:
        self.name = name
        self.shared = 0
        self.opened = 0
        self._apart: set[int] = set()

    @contextmanager
    def apart(self) -> Iterator[None]:
        thread = threading.get_ident()  # both ends may be in this process
        assert thread not in self._apart, "one thing at a time"
        self._apart.add(thread)
        try:
            yield
        finally:
            self._apart.discard(thread)

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def share(self, memory: DeviceMemory) -> bytes:
        assert isinstance(memory, DeviceBytes)
        region = memory.memory.region
        assert region is not None, "only a region can be found by others"
        self.shared += 1
        path = f"/proc/{os.getpid()}/fd/{region.descriptor}"
        return json.dumps({"gpu": self.name, "path": path}).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        found = json.loads(handle)
        if found["gpu"] != self.name:
            raise ValueError(f"the pool is on GPU {found['gpu']}, this worker on {self.name}")
        self.opened += 1
        with Path(found["path"]).open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing may be written to it: nothing is
            return torch.frombuffer(mapping, dtype=torch.uint8)
