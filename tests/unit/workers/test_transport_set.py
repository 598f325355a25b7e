"""Which transports a worker has, and what becomes of one that does not start."""

from __future__ import annotations

import pytest

from configs.schema import TlsSettings, TransferSettings
from kv_transfer.authentication import Secret
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


def test_between_gpus_torch_takes_nccl_and_is_refused_with_the_reason_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TransferSettings(transport="torch")
    made: list[int] = []

    class Nccl:
        def __init__(self, *, device: int, connect_s: float) -> None:
            if made:
                raise RuntimeError("this torch has no NCCL")
            made.append(device)

    monkeypatch.setattr("workers.transport_set.NcclBackend", Nccl)

    build_transports(settings, SECURITY, RDMA, has_region=False, device="cuda")

    assert made == [0]
    with pytest.raises(WorkerError, match=r"model\.device cuda: this torch has no NCCL"):
        build_transports(settings, SECURITY, RDMA, has_region=False, device="cuda")


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
