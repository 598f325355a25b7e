"""What GPUs a host has for a model that is to run on them, and the checks that this needs.

Pure: `workers.host` looks, this judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from configs.schema import TransferSettings
from kv_transfer.transport_kinds import GPU_CAPABILITIES
from kv_transfer.transports.group_memory import NcclMemory
from kv_transfer.transports.pair_table import MAX_PAIRS
from workers.checks import Check, Outcome, check_capabilities, check_data_path, format_bytes

__all__ = ["GpuOutlook", "check_device", "check_gpu_transfer", "gpu_ways"]

_NEEDED = "model.device is cuda, but"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutlook:
    """The GPUs that torch sees."""

    num_gpus: int | None
    """None where this process sees one worker's alone, so that they say nothing about the host."""
    obstacle: str = ""
    """Why torch can use none; empty where it can."""
    nccl: NcclMemory = field(default_factory=NcclMemory)
    """What process groups would take there beside the pools."""


def check_device(outlook: GpuOutlook, shares: Iterable[float]) -> Check:
    """A model that is to run on GPUs finds them; `shares` is what each worker books of one."""
    booked = sum(shares)
    if outlook.obstacle:
        sentence = f"{_NEEDED} {outlook.obstacle}: set it to cpu, or start where a GPU is."
        return Check(id="DEVICE", outcome=Outcome.FAILS, sentence=sentence)
    if outlook.num_gpus is not None and booked > outlook.num_gpus:
        sentence = (
            f"{_NEEDED} the workers book {booked:g} GPUs and there are {outlook.num_gpus}: lower "
            "decode.engine.gpu_share and prefill.engine.gpu_share, or run fewer workers."
        )
        return Check(id="DEVICE", outcome=Outcome.FAILS, sentence=sentence)
    found = "" if outlook.num_gpus is None else f" of the {outlook.num_gpus} that are here"
    sentence = f"The workers book {booked:g} GPUs{found}; Baton was not run on a GPU so far."
    return Check(id="DEVICE", outcome=Outcome.WARNS, sentence=sentence)


_WAYS: Mapping[str, str] = MappingProxyType(
    {
        "cuda_ipc": "cuda_ipc between workers of one GPU, which takes none of its memory",
        "torch": "torch (NCCL) from one GPU to another",
        "tcp": "tcp by way of host memory",
    }
)
"""By transport, best first."""


def gpu_ways(settings: TransferSettings) -> list[str]:
    """The transports that links between GPUs may use, best first; empty where there is none."""
    if settings.transport == "auto":
        # NCCL would go past the certificates.
        return [way for way in _WAYS if way != "torch" or settings.tls is None]
    return [settings.transport] if settings.transport in _WAYS else []


def check_gpu_transfer(settings: TransferSettings, nccl: NcclMemory) -> list[Check]:
    """What KV moves over between pools on GPUs, and who can get at it on each way."""
    ways = gpu_ways(settings)
    if not ways:
        sentence = (
            f"transfer.transport is {settings.transport}, which moves no blocks of pools on GPUs: "
            f"set it to auto, {' or '.join(_WAYS)}."
        )
        return [Check(id="TRANSPORT", outcome=Outcome.FAILS, sentence=sentence)]
    memory = f"{_nccl_sentence(nccl)} " if "torch" in ways else ""
    sentence = (
        f"KV moves over {'; else over '.join(_WAYS[way] for way in ways)}. "
        f"{memory}None of it was run on a GPU so far."
    )
    return [
        Check(id="TRANSPORT", outcome=Outcome.WARNS, sentence=sentence),
        *(
            check
            for way in ways
            for check in (
                check_capabilities(way, GPU_CAPABILITIES),
                check_data_path(way, settings, GPU_CAPABILITIES),
            )
        ),
    ]


def _nccl_sentence(nccl: NcclMemory) -> str:
    return (
        f"By NCCL's documentation and sources, not run: each worker's up to {MAX_PAIRS} process "
        f"groups take {format_bytes(nccl.worker_bytes)} of GPU memory beside its pool, "
        f"{format_bytes(nccl.group_bytes)} each, with {nccl.channels} channels of "
        f"{format_bytes(nccl.buffer_bytes)} in each direction; NCCL's kernels come on top, and "
        "what its configuration files change."
    )
