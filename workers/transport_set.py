"""The transports of a worker: those that its settings allow and that start on this host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from configs.schema import TransferSettings
from kv_transfer.selection import Offer
from kv_transfer.transport import Transport
from kv_transfer.transports.group_backends import NcclBackend
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import NixlMissingError
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.torch import TorchTransport
from kv_transfer.ucx_device import RdmaOutlook
from workers.checks import takes_nixl
from workers.errors import WorkerError

__all__ = ["TransportSet", "build_transports"]

Device = Literal["cpu", "cuda"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSet:
    """What a worker moves KV over."""

    usable: tuple[Transport, ...]
    """Best first."""
    broken: tuple[Offer, ...] = ()
    """What would come before the last of them, but does not start here."""


def build_transports(
    settings: TransferSettings,
    security: LinkSecurity,
    rdma: RdmaOutlook,
    *,
    has_region: bool,
    device: Device = "cpu",
) -> TransportSet:
    """The transports that the settings allow; a server needs a region to serve shm from.

    `device` is what the model runs on: between GPUs torch takes NCCL, which was not run so far.

    Raises `WorkerError` where the only one does not start; `auto` goes on without it.
    """
    match settings.transport:
        case "nixl":
            return TransportSet(usable=(_nixl(settings, security, rdma),))
        case "torch":
            return TransportSet(usable=(_torch(settings, security, device),))
        case "shm":
            return TransportSet(usable=(ShmTransport(secret=security.secret),))
        case "tcp":
            return TransportSet(usable=(TcpTransport(security=security, host=settings.host),))
        case "auto":
            return _every(settings, security, rdma, has_region)


def _every(
    settings: TransferSettings, security: LinkSecurity, rdma: RdmaOutlook, has_region: bool
) -> TransportSet:
    usable: list[Transport] = [ShmTransport(secret=security.secret)] if has_region else []
    broken: list[Offer] = []
    if takes_nixl(settings, rdma):
        try:
            usable.append(_nixl(settings, security, rdma))
        except WorkerError as error:
            logger.warning("not used, blocks go over tcp between hosts error=%s", error)
            broken.append(
                Offer(
                    name=NixlTransport.name,
                    cross_host=NixlTransport.capabilities.cross_host,
                    is_broken=True,
                )
            )
    usable.append(TcpTransport(security=security, host=settings.host))
    return TransportSet(usable=tuple(usable), broken=tuple(broken))


def _torch(settings: TransferSettings, security: LinkSecurity, device: Device) -> Transport:
    if device == "cpu":
        return TorchTransport(security=security, host=settings.host)
    timings = StreamTimings()
    try:
        # A worker's own GPU is the first that it sees.
        backend = NcclBackend(device=0, connect_s=timings.connect_s)
    except RuntimeError as error:
        raise WorkerError(f"transport torch: no NCCL for model.device cuda: {error}") from error
    return TorchTransport(security=security, host=settings.host, timings=timings, backend=backend)


def _nixl(settings: TransferSettings, security: LinkSecurity, rdma: RdmaOutlook) -> Transport:
    try:
        transport = NixlTransport(security=security, host=settings.host, device=rdma.device)
        transport.try_start()
    except (OSError, NixlMissingError) as error:
        raise WorkerError(f"transport nixl: {error}") from error
    return transport
