from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from configs.schema import ModelSettings, TransferSettings
from kv_transfer.transports.group_memory import NcclMemory
from workers.gpu_outlook import GpuOutlook
from workers.host import (
    available_bytes,
    available_cores,
    gpu_outlook,
    is_faster_in_bf16,
    rdma_outlook,
)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("10000000 100000", None)],
)
def test_cores_are_within_the_containers_quota(
    tmp_path: Path, quota: str, cores: int | None
) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"{quota}\n")

    assert available_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_cores_without_a_container_are_those_of_the_affinity(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_memory_is_within_the_containers_limit_less_what_must_stay(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "700000\n")
    assert available_bytes(tmp_path) == 300_000

    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 200000\nactive_file 7\n")
    assert available_bytes(tmp_path) == 500_000


def test_memory_is_never_negative(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/memory.max", "10\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "20\n")

    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("limit", ["max", None])
def test_memory_without_a_limit_is_the_hosts(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        write(tmp_path, "sys/fs/cgroup/memory.max", limit)

    assert 0 < available_bytes(tmp_path) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2", False), ("fpu avx512_bf16", False), ("x amx_bf16 y", True), ("amx_bf16x", False)],
)
def test_bf16_is_read_from_the_cpus_flags(tmp_path: Path, flags: str, expected: bool) -> None:
    write(tmp_path, "proc/cpuinfo", f"processor : 0\nflags\t: {flags}\n")

    assert is_faster_in_bf16(tmp_path) is expected


def test_bf16_is_not_assumed_where_nothing_is_known(tmp_path: Path) -> None:
    assert not is_faster_in_bf16(tmp_path)


def test_a_package_for_rdma_that_does_not_load_is_known_where_it_would_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/device/net/lo").mkdir(parents=True)
    monkeypatch.setattr("workers.host.has_nixl", lambda: True)
    monkeypatch.setattr("workers.host.nixl_problem", lambda: "no libucp")

    wanted = rdma_outlook(TransferSettings(), tmp_path)
    not_wanted = rdma_outlook(TransferSettings(transport="tcp"), tmp_path)

    assert wanted.is_rdma
    assert not wanted.is_best
    assert wanted.problem == "no libucp"
    assert not_wanted.problem == ""


@pytest.mark.parametrize(
    ("built_with", "num_gpus", "outlook"),
    [
        (None, 0, GpuOutlook(num_gpus=0, obstacle="this torch was built without CUDA")),
        ("13.0", 0, GpuOutlook(num_gpus=0, obstacle="torch sees no GPU here")),
        ("13.0", 2, GpuOutlook(num_gpus=2, nccl=NcclMemory.of({"NCCL_BUFFSIZE": "8192"}))),
    ],
)
def test_gpus_are_those_that_torch_can_use(
    built_with: str | None, num_gpus: int, outlook: GpuOutlook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    environ = {"NCCL_BUFFSIZE": "8192"}

    assert gpu_outlook(ModelSettings(device="cuda"), environ) == outlook
    assert gpu_outlook(ModelSettings(device="cpu"), environ) is None
