"""Which transports a worker has, and what becomes of one that does not start."""

from __future__ import annotations

import pytest

from configs.schema import TlsSettings, TransferSettings
from kv_transfer.authentication import Secret
from kv_transfer.transport_kinds import GPU_CAPABILITIES
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.ucx_device import RdmaOutlook
from workers.errors import WorkerError
from workers.transport_set import TransportSet, build_transports

RDMA = RdmaOutlook(is_installed=True, device="mlx5_0:1", is_rdma=True)
SECURITY = LinkSecurity(secret=Secret("a secret of this deployment, which is long"))


def built(transport: str, **changes: object) -> TransportSet:
    settings = TransferSettings.model_validate({"transport": transport, **changes})
    return build_transports(settings, SECURITY, RDMA, has_region=True)


def names(transports: TransportSet) -> list[str]:
    return [transport.name for transport in transports.usable]


class NixlThatStarts(NixlTransport):
    """Without the package."""

    def __init__(self, **arguments: object) -> None:
        return

    def try_start(self) -> None:
        return


class NixlWithoutUcx(NixlThatStarts):
    def try_start(self) -> None:
        raise OSError("UCX does not start with NET_DEVICES=mlx5_0:1")


def use(monkeypatch: pytest.MonkeyPatch, transport: type[NixlTransport]) -> None:
    monkeypatch.setattr("workers.transport_set.NixlTransport", transport)


@pytest.mark.parametrize("transport", ["shm", "tcp", "torch"])
def test_one_that_is_named_is_the_only_one(transport: str) -> None:
    assert names(built(transport)) == [transport]


def test_auto_has_every_one_but_torch_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, NixlThatStarts)

    assert names(built("auto")) == ["shm", "nixl", "tcp"]
    assert names(built("nixl")) == ["nixl"]


class Gpu:
    """None of it is asked for before a server starts."""


class Nccl:
    memory = "cuda"

    def __init__(self, *, device: int, connect_s: float, interface: str) -> None:
        assert device == 0, "a worker sees no other"
        assert interface == "lo", "the one that has transfer.host"


class NoNccl(Nccl):
    def __init__(self, *, device: int, connect_s: float, interface: str) -> None:
        raise RuntimeError("this torch has no NCCL")


def built_for_gpus(transport: str, **changes: object) -> TransportSet:
    settings = TransferSettings.model_validate({"transport": transport, **changes})
    return build_transports(
        settings,
        SECURITY,
        RDMA,
        has_region=False,
        gpu=Gpu(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("transport", ["cuda_ipc", "torch", "tcp"])
def test_one_that_is_named_is_the_only_one_between_gpus(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.transport_set.NcclBackend", Nccl)

    assert names(built_for_gpus(transport)) == [transport]


def test_between_gpus_auto_has_every_one_that_knows_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.transport_set.NcclBackend", Nccl)

    transports = built_for_gpus("auto")

    assert names(transports) == ["cuda_ipc", "torch", "tcp"] == list(GPU_CAPABILITIES)
    for each in transports.usable:
        assert each.capabilities == GPU_CAPABILITIES[each.name]
    tls = TlsSettings(certificate="a.pem", key="a.key", ca="ca.pem")
    encrypting = LinkSecurity(secret=SECURITY.secret)
    settings = TransferSettings(tls=tls)
    with_tls = build_transports(settings, encrypting, RDMA, has_region=False, gpu=Gpu())  # type: ignore[arg-type]
    assert names(with_tls) == ["cuda_ipc", "tcp"]


def test_between_gpus_auto_goes_on_without_nccl_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.transport_set.NcclBackend", NoNccl)

    transports = built_for_gpus("auto")

    assert names(transports) == ["cuda_ipc", "tcp"]
    assert [(offer.name, offer.is_broken) for offer in transports.broken] == [("torch", True)]
    assert len(caplog.records) == 1
    with pytest.raises(WorkerError, match=r"model\.device cuda: this torch has no NCCL"):
        built_for_gpus("torch")


@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_what_knows_host_memory_alone_is_refused_between_gpus(transport: str) -> None:
    with pytest.raises(WorkerError, match=f"{transport} moves no blocks of pools on GPUs"):
        built_for_gpus(transport)


def test_cuda_ipc_is_refused_without_a_gpu() -> None:
    with pytest.raises(WorkerError, match=r"cuda_ipc: model\.device is cpu"):
        built("cuda_ipc")


@pytest.mark.parametrize("has_package", [True, False])
def test_auto_goes_on_without_nixl_that_does_not_start_and_says_so(
    has_package: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if has_package:
        use(monkeypatch, NixlWithoutUcx)
    else:
        monkeypatch.setattr(nixl_agent, "_PACKAGES", ("no_such_package",))

    transports = built("auto")

    assert names(transports) == ["shm", "tcp"]
    assert [(offer.name, offer.is_broken) for offer in transports.broken] == [("nixl", True)]
    assert len(caplog.records) == 1
    with pytest.raises(WorkerError, match="transport nixl: "):
        built("nixl")


def test_auto_with_certificates_takes_nothing_whose_data_path_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, NixlThatStarts)
    tls = TlsSettings(certificate="a.pem", key="a.key", ca="ca.pem")

    transports = built("auto", tls=tls)

    assert names(transports) == ["shm", "tcp"]
    assert not any(t.capabilities.data_path == "open" for t in transports.usable)
    assert transports.broken == ()


def test_nccl_is_refused_where_no_interface_has_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.transport_set.NcclBackend", Nccl)

    with pytest.raises(WorkerError, match=r"no network interface .* 192\.0\.2\.1"):
        built_for_gpus("torch", host="192.0.2.1")
