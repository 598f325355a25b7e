"""What this machine gives the workers: cores, memory, arithmetic. Container limits count."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from configs.schema import ModelSettings, TransferSettings
from kv_transfer.transports.group_memory import NcclMemory
from kv_transfer.transports.nixl_agent import has_nixl, nixl_problem
from kv_transfer.ucx_device import RdmaOutlook, find_rdma_devices, outlook
from workers.checks import takes_nixl
from workers.gpu_outlook import GpuOutlook

__all__ = ["available_bytes", "available_cores", "gpu_outlook", "is_faster_in_bf16", "rdma_outlook"]

_ROOT = Path("/")
_IP = frozenset({socket.AF_INET, socket.AF_INET6})


def available_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy: its affinity's, or a container's quota if less."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping, within the container's limit if there is one."""
    available = int(psutil.virtual_memory().available)
    group = root / "sys/fs/cgroup"
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    if limit.isdigit() and used.isdigit():
        # Files read once count as used until someone needs their memory.
        pages = _read(group / "memory.stat").split()
        files = dict(zip(pages[::2], pages[1::2], strict=False)).get("inactive_file", "0")
        available = min(available, max(0, int(limit) - int(used) + int(files)))
    return available


def is_faster_in_bf16(root: Path = _ROOT) -> bool:
    """Whether this CPU computes models faster in bf16 than in fp32: only where it has AMX.

    With AVX-512's bf16 alone prompts took 1.5 times as long as in fp32, and a step of 16 sequences
    0.95 times (`tests/bench/bench_runner.py`, torch 2.13).
    """
    return "amx_bf16" in _read(root / "proc/cpuinfo").split()


def gpu_outlook(model: ModelSettings, environ: Mapping[str, str]) -> GpuOutlook | None:
    """The GPUs of this process for a model that wants them; None for one that does not.

    `environ` is what NCCL would find there.
    """
    if model.device == "cpu":
        return None
    import torch  # here: it takes seconds, which who asks for no GPU does not pay

    if torch.version.cuda is None:
        return GpuOutlook(num_gpus=0, obstacle="this torch was built without CUDA")
    if not torch.cuda.is_available():
        return GpuOutlook(num_gpus=0, obstacle="torch sees no GPU here")
    return GpuOutlook(num_gpus=torch.cuda.device_count(), nccl=NcclMemory.of(environ))


def network_addresses() -> dict[str, list[str]]:
    """The IP addresses of each network interface."""
    return {
        interface: [entry.address for entry in entries if entry.family in _IP]
        for interface, entries in psutil.net_if_addrs().items()
    }


def rdma_outlook(settings: TransferSettings, root: Path = _ROOT) -> RdmaOutlook:
    """What the nixl transport would have here."""
    found = outlook(
        settings.host,
        settings.ucx_device,
        is_installed=has_nixl(),
        addresses=network_addresses(),
        rdma_devices=find_rdma_devices(root / "sys/class/infiniband"),
    )
    is_wanted = settings.transport == "nixl" or takes_nixl(settings, found)
    if is_wanted and found.is_installed and not found.problem:  # loading takes half a second
        return replace(found, problem=nixl_problem())
    return found


def _read(path: Path) -> str:
    """The file's text; empty where the kernel does not offer it."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
