"""The transports that talk in frames over a stream socket, as tests need them: one entry each."""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from kv_transfer.authentication import Secret
from kv_transfer.transport import Transport
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import has_nixl
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.wire import FrameType

SECRET = Secret("the secret of the deployments that tests make")


def tcp_transport(
    *, host: str = "127.0.0.1", timings: StreamTimings | None = None, secret: Secret = SECRET
) -> TcpTransport:
    """One of a process that knows the secret of all tests, or another."""
    return TcpTransport(security=LinkSecurity(secret=secret), host=host, timings=timings)


def shm_transport(*, timings: StreamTimings | None = None, secret: Secret = SECRET) -> ShmTransport:
    """The same over shared memory."""
    return ShmTransport(secret=secret, timings=timings)


def nixl_transport(
    *,
    timings: StreamTimings | None = None,
    secret: Secret = SECRET,
    ucx_options: Mapping[str, str] | None = None,
) -> NixlTransport:
    """The same by READs of a NIXL agent."""
    security = LinkSecurity(secret=secret)
    return NixlTransport(security=security, timings=timings, ucx_options=ucx_options)


def torch_transport(*, secret: Secret = SECRET, **arguments: Any) -> Transport:
    """Imports torch when it is first called: a process of another kind starts without it."""
    from kv_transfer.transports.torch import TorchTransport

    return TorchTransport(security=LinkSecurity(secret=secret), **arguments)


def cuda_ipc_transport(*, secret: Secret = SECRET, **arguments: Any) -> Transport:
    """With shared host memory in the GPU's place; imports torch as well."""
    from kv_transfer.transports.cuda_ipc import CudaIpcTransport
    from tests.fakes.device import SharedHostDevice

    return CudaIpcTransport(secret=secret, **{"device": SharedHostDevice(), **arguments})


def staged_tcp_transport(**arguments: Any) -> Transport:
    """Over tcp between pools on GPUs, whose part host memory plays; imports torch as well."""
    from kv_transfer.transports.staged import StagedTransport
    from tests.fakes.device import SharedHostDevice

    return StagedTransport(tcp_transport(**arguments), SharedHostDevice())


def device_torch_transport(**arguments: Any) -> Transport:
    """Over Gloo between pools on GPUs, as over NCCL; imports torch as well."""
    from kv_transfer.transports.group_backends import GlooBackend

    class Gloo(GlooBackend):
        """Takes what is on the device for what it reaches: it is host memory here."""

        memory = "cuda"

    return torch_transport(backend=Gloo(host="127.0.0.1", connect_s=2.0), **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKind:
    """How to make one, and how to get between its two ends."""

    name: str
    transport: Callable[..., Transport]
    """Takes `timings` and `secret`."""
    block_frame: FrameType
    """What a block is announced by."""
    variant: str = ""
    """What distinguishes kinds of one transport."""

    @property
    def label(self) -> str:
        """Unlike that of every other kind."""
        return self.name + self.variant

    @property
    def has_directions(self) -> bool:
        """Whether they follow the welcome."""
        return self.name in ("nixl", "cuda_ipc")

    @property
    def is_local(self) -> bool:
        """Whether its addresses are those of one host."""
        return self.name in ("shm", "cuda_ipc")

    def connect(self, address: str) -> socket.socket:
        """A connection to a server, blocking."""
        if self.is_local:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect("\0" + address.removeprefix("@"))
            return connection
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)))

    def listen(self) -> tuple[socket.socket, str]:
        """A listening socket and its address, as a server would give it."""
        if self.is_local:
            address = f"@baton-test-{secrets.token_hex(8)}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0" + address.removeprefix("@"))
            listener.listen(256)
            return listener, address
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        return listener, f"{host}:{port}"

    async def open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a server as streams."""
        return await asyncio.open_connection(sock=self.connect(address))


TCP = StreamKind(name="tcp", transport=tcp_transport, block_frame=FrameType.DATA)
SHM = StreamKind(name="shm", transport=shm_transport, block_frame=FrameType.LOCATED)
NIXL = StreamKind(name="nixl", transport=nixl_transport, block_frame=FrameType.LOCATED)
NIXL_TCP = StreamKind(
    name="nixl",
    transport=functools.partial(nixl_transport, ucx_options={"TLS": "tcp"}),
    block_frame=FrameType.LOCATED,
    variant="-tcp",
)
"""Within a host UCX copies by itself (CMA); over TCP the owner has to send, as between hosts."""
TORCH = StreamKind(name="torch", transport=torch_transport, block_frame=FrameType.LOCATED)
CUDA_IPC = StreamKind(name="cuda_ipc", transport=cuda_ipc_transport, block_frame=FrameType.LOCATED)
TCP_STAGED = StreamKind(
    name="tcp", transport=staged_tcp_transport, block_frame=FrameType.DATA, variant="-staged"
)
TORCH_DEVICE = StreamKind(
    name="torch",
    transport=device_torch_transport,
    block_frame=FrameType.LOCATED,
    variant="-device",
)
DEVICE_KINDS = (CUDA_IPC, TCP_STAGED, TORCH_DEVICE)
"""Between pools on a GPU, whose part shared host memory plays."""
NIXL_KINDS = (NIXL, NIXL_TCP)
STREAM_KINDS = (TCP, SHM, TORCH)
FRAME_KINDS = (TCP, SHM, *NIXL_KINDS)
"""Those whose blocks can be had, or given, by frames alone."""
ALL_KINDS = (*STREAM_KINDS, *NIXL_KINDS)

needs_nixl = pytest.mark.skipif(
    not has_nixl(), reason="the optional package nixl-cu13 is not installed"
)


def kind_parameters(kinds: Sequence[StreamKind] = ALL_KINDS) -> list[ParameterSet]:
    """The kinds as a fixture's parameters; those whose package is missing are skipped."""
    return [
        pytest.param(kind, id=kind.label, marks=[needs_nixl] if kind.name == "nixl" else [])
        for kind in kinds
    ]


QUICK = StreamTimings(connect_s=1.0, silence_s=0.4, keep_alive_s=0.05)
"""For tests in which somebody falls silent."""
