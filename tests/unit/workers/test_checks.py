from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from configs.schema import TlsSettings, TransferSettings
from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import Capabilities
from kv_transfer.transport_kinds import CAPABILITIES, GPU_CAPABILITIES
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.torch import TorchTransport
from kv_transfer.ucx_device import RdmaOutlook
from workers.checks import (
    INV_POOL_WINDOW,
    Outcome,
    check_capabilities,
    check_data_path,
    check_link,
    check_pool_window,
    check_runner,
    check_transfer,
    check_transport,
    check_window,
    format_bytes,
)
from workers.runner_choice import RunnerChoice

NO_RDMA = RdmaOutlook(is_installed=False, device="lo", is_rdma=False)
LOOPBACK = RdmaOutlook(is_installed=True, device="lo", is_rdma=False)
RDMA = RdmaOutlook(is_installed=True, device="mlx5_0:1", is_rdma=True)

LOCAL = TransferSettings()
WIDE = TransferSettings(host="10.0.0.1")
READS = "decode reads blocks by itself"
IS_GIVEN = "decode is given blocks by prefill"
CLOSED = "its session is closed"
ABORTED = "its process group is aborted"
TLS = TlsSettings(certificate="a.pem", key="a.key", ca="ca.pem")


def transfer(wanted: str, **changes: object) -> TransferSettings:
    return TransferSettings.model_validate({"transport": wanted, **changes})


def peer(worker_id: str, **changes: object) -> PeerInfo:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": "i",
        "fingerprint": "f" * 32,
        "content_fingerprint": "c" * 32,
        "bytes_per_block": 1,
        "layers_per_block": 2,
        "tp_size": 1,
        "tp_rank": 0,
        "model_digest": "m",
        "dtype": "fp32",
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "block_size": 16,
        "max_model_len": 4096,
        "pool_tokens": 8192,
    }
    return PeerInfo(**(values | changes))  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("choice", "outcome", "says"),
    [
        (
            RunnerChoice(tier="T1", cause="by_hand", reason="it is known"),
            Outcome.HOLDS,
            "is run as T1: it is known.",
        ),
        (
            RunnerChoice(tier="refused", cause="refused", reason="it keeps a state"),
            Outcome.FAILS,
            "A model of type odd cannot be served: it keeps a state.",
        ),
    ],
    ids=["known", "refused"],
)
def test_the_kind_of_model_is_one_that_can_be_run(
    choice: RunnerChoice, outcome: Outcome, says: str
) -> None:
    check = check_runner("odd", choice)

    assert check.outcome is outcome
    assert says in check.sentence


def test_window_check_allows_equality() -> None:
    assert check_window(window=8192, context_length=8192).ok


def test_pool_check_compares_pool_and_window() -> None:
    assert check_pool_window("decode", pool_tokens=100, window=100).ok
    assert not check_pool_window("decode", pool_tokens=99, window=100).ok


def test_link_holds_between_equal_peers() -> None:
    check = check_link(peer("decode-0"), peer("prefill-0"))

    assert check.ok
    assert check.id == INV_POOL_WINDOW


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "0" * 32}, ["fingerprint differs", "0" * 32]),
        ({"dtype": "bf16"}, ["dtype differs", "fp32", "bf16"]),
        ({"max_model_len": 2048}, ["window differs", "4096", "2048"]),
        ({"pool_tokens": 4095}, ["prefill-0 holds 4095", "4096"]),
    ],
)
def test_link_is_refused_with_what_differs(changes: dict[str, object], words: list[str]) -> None:
    check = check_link(peer("decode-0"), peer("prefill-0", **changes))

    assert not check.ok
    assert all(word in check.sentence for word in words)


def test_link_is_refused_when_the_decode_side_lacks_the_window() -> None:
    check = check_link(peer("decode-0", pool_tokens=1), peer("prefill-0"))

    assert not check.ok
    assert "decode-0 holds 1 tokens" in check.sentence


@pytest.mark.parametrize(
    ("wanted", "shares_memory", "outcome", "says"),
    [
        ("auto", True, Outcome.HOLDS, "over shm: the workers share this host's memory; between"),
        ("auto", False, Outcome.HOLDS, "over tcp: this host lets no process share memory"),
        ("tcp", True, Outcome.HOLDS, "over tcp: transfer.transport says so"),
        ("torch", True, Outcome.HOLDS, "16 process groups, which take 64.0 MiB at most"),
        (
            "torch",
            False,
            Outcome.HOLDS,
            "over torch.distributed (Gloo): transfer.transport says so",
        ),
        ("shm", True, Outcome.HOLDS, "over shm: the workers share this host's memory."),
        ("shm", False, Outcome.FAILS, "transfer.transport is shm, but this host"),
    ],
)
def test_the_plan_says_what_kv_moves_over_and_why(
    wanted: str, shares_memory: bool, outcome: Outcome, says: str
) -> None:
    check = check_transport(transfer(wanted), shares_memory, NO_RDMA)

    assert check.outcome is outcome
    assert says in check.sentence


@pytest.mark.parametrize(
    ("wanted", "rdma", "outcome", "says"),
    [
        ("nixl", NO_RDMA, Outcome.FAILS, "pip install 'baton-serve[rdma]'"),
        ("nixl", LOOPBACK, Outcome.WARNS, "without RDMA, on lo: slower than tcp"),
        ("nixl", replace(LOOPBACK, device=None), Outcome.WARNS, "on all devices"),
        ("nixl", replace(LOOPBACK, problem="no device"), Outcome.FAILS, "nixl: no device."),
        ("nixl", RDMA, Outcome.HOLDS, "RDMA on mlx5_0:1"),
        ("auto", RDMA, Outcome.HOLDS, "over nixl: this host lets no process share memory"),
        ("auto", LOOPBACK, Outcome.HOLDS, "over tcp: this host lets no process share memory"),
        ("auto", replace(RDMA, is_installed=False), Outcome.HOLDS, "over tcp: this host"),
        ("auto", replace(RDMA, problem="no libucp"), Outcome.HOLDS, "tcp (not nixl: no libucp)"),
        ("nixl", replace(RDMA, problem="no libucp"), Outcome.FAILS, "nixl: no libucp."),
        ("tcp", RDMA, Outcome.HOLDS, "over tcp: transfer.transport says so"),
    ],
)
def test_nixl_is_what_auto_takes_only_with_rdma_and_its_package(
    wanted: str, rdma: RdmaOutlook, outcome: Outcome, says: str
) -> None:
    check = check_transport(transfer(wanted), False, rdma)

    assert check.outcome is outcome
    assert says in check.sentence


@pytest.mark.parametrize(
    ("transport", "settings", "outcome", "says"),
    [
        ("shm", WIDE, Outcome.HOLDS, "shm: both ends know the deployment's secret; blocks never"),
        ("tcp", LOCAL, Outcome.HOLDS, "unencrypted on 127.0.0.1: transfer.tls"),
        ("tcp", WIDE, Outcome.WARNS, "unencrypted on 10.0.0.1: transfer.tls"),
        ("tcp", TransferSettings(host="10.0.0.1", tls=TLS), Outcome.HOLDS, "move inside TLS"),
        ("nixl", WIDE, Outcome.WARNS, "has to keep strangers off 10.0.0.1"),
    ],
)
def test_the_plan_says_who_can_get_at_blocks_on_their_way(
    transport: str, settings: TransferSettings, outcome: Outcome, says: str
) -> None:
    check = check_data_path(transport, settings)

    assert check.outcome is outcome
    assert says in check.sentence


def test_auto_takes_nothing_open_where_kv_is_to_be_encrypted() -> None:
    checks = check_transfer(transfer("auto", tls=TLS), RDMA, shares_memory=False)

    assert "tcp (not nixl, which transfer.tls does not encrypt)" in checks[0].sentence
    assert {check.sentence.partition(":")[0] for check in checks[1:]} == {"tcp"}


@pytest.mark.parametrize("transport", [ShmTransport, TcpTransport, NixlTransport, TorchTransport])
def test_what_is_said_of_a_transport_is_what_it_declares(transport) -> None:
    assert CAPABILITIES[transport.name] is transport.capabilities


@pytest.mark.parametrize(
    ("declared", "transport", "says", "fence"),
    [
        (CAPABILITIES, "shm", f"within a host, for pools in host memory; {READS}", CLOSED),
        (
            CAPABILITIES,
            "tcp",
            f"within and between hosts, for pools in host memory; {IS_GIVEN}",
            CLOSED,
        ),
        (
            CAPABILITIES,
            "nixl",
            f"within and between hosts, for pools in host memory; {READS}",
            "its READs are done or decode's agent is ended",
        ),
        (
            CAPABILITIES,
            "torch",
            f"within and between hosts, for pools in host memory; {IS_GIVEN}",
            ABORTED,
        ),
        (
            GPU_CAPABILITIES,
            "cuda_ipc",
            f"within a host, on one GPU, for pools in cuda memory; {READS}",
            CLOSED,
        ),
        (
            GPU_CAPABILITIES,
            "torch",
            "within and between hosts, from one GPU to another, for pools in cuda memory; "
            f"{IS_GIVEN}",
            ABORTED,
        ),
        (
            GPU_CAPABILITIES,
            "tcp",
            f"within and between hosts, for pools in cuda memory; {IS_GIVEN}",
            CLOSED,
        ),
    ],
)
def test_the_plan_says_what_a_transport_can_do(
    declared: Mapping[str, Capabilities], transport: str, says: str, fence: str
) -> None:
    waits = "and waits while prefill's process is stopped"
    reuse = f"blocks of a failed transfer stay unused until {fence}."

    said = check_capabilities(transport, declared).sentence
    assert said == f"{transport}: {says}, {waits}; {reuse}"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (46_080, "45.0 KiB"),
        (2**20, "1.00 MiB"),
        (2_264_924_160, "2.11 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
