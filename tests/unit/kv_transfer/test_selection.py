"""Which transport a link gets, and why."""

import dataclasses
import re
from pathlib import Path

import pytest

from kv_transfer.selection import LinkReason, Offer, choose
from kv_transfer.transport import LinkRefusedError
from tests.fakes.block_memory import peer_info

SHM = Offer(name="shm", cross_host=False)
TCP = Offer(name="tcp", cross_host=True)
NIXL = Offer(name="nixl", cross_host=True)
BROKEN = Offer(name="nixl", cross_host=True, is_broken=True)
EVERY = ["shm", "nixl", "tcp"]
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kv-handoff.md"


def worker(name, host="here", transports=("shm", "tcp")):
    info = peer_info(name, f"{name}-1", bytes_per_block=8, host=host)
    endpoints = tuple((transport, f"{name}:{transport}") for transport in transports)
    return dataclasses.replace(info, endpoints=endpoints)


@pytest.mark.parametrize(
    ("offers", "peer", "transport", "reason"),
    [
        ([SHM, TCP], worker("p"), "shm", LinkReason.SAME_HOST),
        ([SHM, TCP], worker("p", host="there"), "tcp", LinkReason.OTHER_HOST),
        ([SHM, TCP], worker("p", host=""), "tcp", LinkReason.UNKNOWN_HOST),
        ([SHM, TCP], worker("p", transports=["tcp"]), "tcp", LinkReason.NOT_OFFERED),
        ([TCP, SHM], worker("p"), "tcp", LinkReason.BEST),
        ([TCP, SHM], worker("p", transports=["shm"]), "shm", LinkReason.NOT_OFFERED),
        ([SHM, BROKEN, TCP], worker("p", "there", EVERY), "tcp", LinkReason.BROKEN),
        ([BROKEN, TCP], worker("p", transports=EVERY), "tcp", LinkReason.BROKEN),
        ([SHM, BROKEN, TCP], worker("p"), "shm", LinkReason.SAME_HOST),
        ([SHM, NIXL, TCP], worker("p", "there", EVERY), "nixl", LinkReason.OTHER_HOST),
        ([SHM, NIXL, TCP], worker("p", "there"), "tcp", LinkReason.NOT_OFFERED),
        ([SHM], worker("p"), "shm", LinkReason.ONLY_ONE),
        ([TCP], worker("p"), "tcp", LinkReason.ONLY_ONE),
    ],
)
def test_the_best_transport_that_reaches_is_chosen(offers, peer, transport, reason):
    choice = choose(offers, worker("d"), peer)
    assert (choice.transport, choice.reason) == (transport, reason)


IPC = Offer(name="cuda_ipc", cross_host=False, memory_kinds=frozenset({"cuda"}), gpus="one")
NCCL = Offer(name="torch", cross_host=True, memory_kinds=frozenset({"cuda"}), gpus="two")
STAGED = Offer(name="tcp", cross_host=True, memory_kinds=frozenset({"cuda"}))
GPU_WAYS = ["cuda_ipc", "torch", "tcp"]


def gpu_worker(name, gpu, host="here"):
    return dataclasses.replace(worker(name, host, GPU_WAYS), gpu=gpu)


@pytest.mark.parametrize(
    ("gpu", "host", "transport", "reason"),
    [
        ("GPU-a", "here", "cuda_ipc", LinkReason.SAME_GPU),
        ("GPU-b", "here", "torch", LinkReason.OTHER_GPU),
        ("GPU-b", "there", "torch", LinkReason.OTHER_HOST),
        ("GPU-a", "there", "tcp", LinkReason.ONE_GPU),  # two containers on one GPU
    ],
)
def test_between_gpus_it_matters_whether_they_are_one(gpu, host, transport, reason):
    choice = choose(
        [IPC, NCCL, STAGED], gpu_worker("d", "GPU-a"), gpu_worker("p", gpu, host), "cuda"
    )
    assert (choice.transport, choice.reason) == (transport, reason)


def test_what_does_not_reach_between_the_gpus_is_refused_with_both():
    me = gpu_worker("d", "GPU-a")
    with pytest.raises(LinkRefusedError, match="torch does not reach from GPU GPU-a of p to GPU"):
        choose([NCCL], me, gpu_worker("p", "GPU-a"), "cuda")
    with pytest.raises(LinkRefusedError, match="cuda_ipc does not reach from GPU GPU-b of p to"):
        choose([IPC], me, gpu_worker("p", "GPU-b"), "cuda")


def test_two_hosts_that_nobody_knows_are_not_one():
    choice = choose([SHM, TCP], worker("d", host=""), worker("p", host=""))
    assert (choice.transport, choice.reason) == ("tcp", LinkReason.UNKNOWN_HOST)


def test_shared_memory_between_two_hosts_is_refused_with_both():
    with pytest.raises(LinkRefusedError, match="shm needs one host: p is on there, d on here"):
        choose([SHM], worker("d"), worker("p", host="there"))
    with pytest.raises(LinkRefusedError, match="p is on an unknown one, d on here"):
        choose([SHM], worker("d"), worker("p", host=""))
    with pytest.raises(LinkRefusedError, match="p is on there, d on an unknown one"):
        choose([SHM], worker("d", host=""), worker("p", host="there"))


def test_no_transport_in_common_is_refused_with_both_lists():
    with pytest.raises(LinkRefusedError, match=r"p offers \['tcp'\], d has \['shm'\]"):
        choose([BROKEN, SHM], worker("d"), worker("p", transports=["tcp"]))


def test_memory_that_a_better_transport_does_not_move_takes_the_next():
    gpu = Offer(name="tcp", cross_host=True, memory_kinds=frozenset({"host", "cuda"}))
    choice = choose([SHM, gpu], worker("d"), worker("p"), "cuda")
    assert (choice.transport, choice.reason) == ("tcp", LinkReason.OTHER_MEMORY)


def test_memory_that_no_transport_moves_is_refused_with_the_way_out():
    with pytest.raises(LinkRefusedError, match="shm or tcp moves no blocks of a pool in cuda"):
        choose([SHM, TCP], worker("d"), worker("p"), "cuda")


def test_the_documentation_has_a_row_for_every_reason_and_no_other():
    _, _, table = DOCUMENT.read_text("utf-8").partition("\n| reason | |\n| --- | --- |\n")
    rows, _, _ = table.partition("\n\n")
    first_cells = [row.split("|")[1] for row in rows.splitlines()]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]

    assert sorted(named) == sorted(reason.value for reason in LinkReason)
