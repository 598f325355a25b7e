"""What each kind of transport can do, in one place: workers choose by it, `baton check` shows it.

Pure, so that a plan can be made without loading any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kv_transfer.transport import Capabilities, MemoryKind

__all__ = ["CAPABILITIES", "GPU_CAPABILITIES"]

_HOST: frozenset[MemoryKind] = frozenset({"host"})
_CUDA: frozenset[MemoryKind] = frozenset({"cuda"})

CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "shm": Capabilities(
            one_sided=True,
            peer_must_poll=True,
            fence="on_close",
            memory_kinds=_HOST,
            cross_host=False,
            data_path="host",
        ),
        "tcp": Capabilities(
            one_sided=False,
            peer_must_poll=True,
            fence="on_close",
            memory_kinds=_HOST,
            cross_host=True,
            data_path="authenticated",  # unless it is inside TLS
        ),
        "nixl": Capabilities(
            one_sided=True,  # but over UCX's TCP, where the owner's process answers each READ
            peer_must_poll=True,
            fence="on_agent_restart",
            memory_kinds=_HOST,
            cross_host=True,
            data_path="open",
        ),
        "torch": Capabilities(
            one_sided=False,
            peer_must_poll=True,
            fence="on_abort",
            memory_kinds=_HOST,
            cross_host=True,
            data_path="open",
        ),
    }
)
"""By the transport's name, for pools in host memory."""

GPU_CAPABILITIES: Mapping[str, Capabilities] = MappingProxyType(
    {
        "cuda_ipc": Capabilities(
            one_sided=True,
            peer_must_poll=True,
            fence="on_close",
            memory_kinds=_CUDA,
            cross_host=False,
            gpus="one",
            data_path="host",
        ),
        # By NCCL, which makes no group of two on one GPU.
        "torch": replace(CAPABILITIES["torch"], memory_kinds=_CUDA, gpus="two"),
        # By way of the host's memory.
        "tcp": replace(CAPABILITIES["tcp"], memory_kinds=_CUDA),
    }
)
"""By the transport's name, for pools on GPUs; best first."""
