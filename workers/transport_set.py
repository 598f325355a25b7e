"""The transports of a worker: those that its settings allow and that start on this host."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from configs.addresses import interface_of
from configs.schema import TransferSettings
from kv_transfer.selection import Offer
from kv_transfer.transport import Transport
from kv_transfer.transport_kinds import GPU_CAPABILITIES
from kv_transfer.transports.cuda_device import CudaDevice
from kv_transfer.transports.cuda_ipc import CudaIpcTransport
from kv_transfer.transports.group_backends import NcclBackend
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import NixlMissingError
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.staged import StagedTransport
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.torch import TorchTransport
from kv_transfer.ucx_device import RdmaOutlook
from workers.checks import takes_nixl
from workers.errors import WorkerError
from workers.host import network_addresses

__all__ = ["TransportSet", "build_transports"]

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
    gpu: CudaDevice | None = None,
) -> TransportSet:
    """The transports that the settings allow; a server needs a region to serve shm from.

    `gpu` is the one with the worker's pool: then there are other ones, none of which was run on a
    GPU so far.

    Raises `WorkerError` where the only one does not start; `auto` goes on without it.
    """
    if gpu is not None:
        return _between_gpus(settings, security, gpu)
    match settings.transport:
        case "nixl":
            return TransportSet(usable=(_nixl(settings, security, rdma),))
        case "torch":
            return TransportSet(usable=(TorchTransport(security=security, host=settings.host),))
        case "shm":
            return TransportSet(usable=(ShmTransport(secret=security.secret),))
        case "tcp":
            return TransportSet(usable=(TcpTransport(security=security, host=settings.host),))
        case "cuda_ipc":
            raise WorkerError("transport cuda_ipc: model.device is cpu")
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
            broken.append(Offer.by(NixlTransport.name, NixlTransport.capabilities, is_broken=True))
    usable.append(TcpTransport(security=security, host=settings.host))
    return TransportSet(usable=tuple(usable), broken=tuple(broken))


def _between_gpus(
    settings: TransferSettings, security: LinkSecurity, gpu: CudaDevice
) -> TransportSet:
    ipc = CudaIpcTransport(secret=security.secret, device=gpu)
    tcp = StagedTransport(TcpTransport(security=security, host=settings.host), gpu)
    match settings.transport:
        case "cuda_ipc":
            return TransportSet(usable=(ipc,))
        case "torch":
            return TransportSet(usable=(_nccl(settings, security),))
        case "tcp":
            return TransportSet(usable=(tcp,))
        case "auto" if settings.tls is not None:  # which NCCL would go past
            return TransportSet(usable=(ipc, tcp))
        case "auto":
            return _every_between_gpus(settings, security, ipc, tcp)
        case "shm" | "nixl":
            raise WorkerError(f"transport {settings.transport} moves no blocks of pools on GPUs")


def _every_between_gpus(
    settings: TransferSettings, security: LinkSecurity, ipc: Transport, tcp: Transport
) -> TransportSet:
    try:
        return TransportSet(usable=(ipc, _nccl(settings, security), tcp))
    except WorkerError as error:
        logger.warning("not used, blocks go over tcp between GPUs error=%s", error)
        name = TorchTransport.name
        broken = Offer.by(name, GPU_CAPABILITIES[name], is_broken=True)
        return TransportSet(usable=(ipc, tcp), broken=(broken,))


def _nccl(settings: TransferSettings, security: LinkSecurity) -> Transport:
    timings = StreamTimings()
    try:
        interface = interface_of(settings.host, network_addresses())
        # A worker's own GPU is the first that it sees.
        backend = NcclBackend(device=0, connect_s=timings.connect_s, interface=interface)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(f"transport torch: no NCCL for model.device cuda: {error}") from error
    return TorchTransport(security=security, host=settings.host, timings=timings, backend=backend)


def _nixl(settings: TransferSettings, security: LinkSecurity, rdma: RdmaOutlook) -> Transport:
    try:
        transport = NixlTransport(security=security, host=settings.host, device=rdma.device)
        transport.try_start()
    except (OSError, NixlMissingError) as error:
        raise WorkerError(f"transport nixl: {error}") from error
    return transport
