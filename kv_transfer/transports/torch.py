"""The torch transport: blocks over process groups of torch.distributed, two ranks each.

Control goes as with tcp, one connection per transfer; the bytes go over a group that the two
workers keep for all transfers between them. Each fetch is a turn: the receiver takes the pair's
seat at its end, asks the owner for the same, posts its receives and fetches; so both ends have one
order of messages, and the bytes of two transfers never mix. A turn that does not end well takes its
group with it, and the next one makes another, of a higher epoch.

What tcp checks is checked: the owner authorises each block when it is asked for and digests it for
its place, the receiver digests what has come. A group's sockets authenticate nobody and encrypt
nothing, and a digest finds faults, not forgery: a network policy has to keep strangers off them.

The fence is the group's abort: after it nothing lands, whatever the peer still sends.
"""

from __future__ import annotations

from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    FetchSession,
    GrantAuthority,
)
from kv_transfer.transport_kinds import CAPABILITIES, GPU_CAPABILITIES
from kv_transfer.transports.group_backends import GlooBackend
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.pair_table import PairLimits, PairTable
from kv_transfer.transports.process_group import GroupBackend, PairGroup
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames
from kv_transfer.transports.tcp_socket import dial
from kv_transfer.transports.torch_owner import GroupOutlet
from kv_transfer.transports.torch_receiver import GroupSource
from kv_transfer.transports.wire import Identity


class TorchTransport:
    """Blocks over a process group for each peer; control over one TCP connection per transfer."""

    name = "torch"
    capabilities = CAPABILITIES["torch"]

    def __init__(
        self,
        *,
        security: LinkSecurity,
        host: str = "127.0.0.1",
        port: int = 0,
        timings: StreamTimings | None = None,
        limits: PairLimits | None = None,
        backend: GroupBackend | None = None,
    ) -> None:
        """Control listens on `host`, and on `port` (0: any); groups where their backend does.

        Gloo does so on `host`, at both ends; NCCL on the interface that it was given.
        """
        self._security = security
        self._host = host
        self._port = port
        self._timings = timings or StreamTimings()
        self._limits = limits or PairLimits()
        self._backend = backend or GlooBackend(host=host, connect_s=self._timings.connect_s)
        if self._backend.memory == "cuda":
            self.capabilities = GPU_CAPABILITIES["torch"]
        self._pairs: PairTable[PairGroup] = PairTable(self._limits)

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker."""
        outlet = GroupOutlet(
            memory, host=self._host, port=self._port, limits=self._limits, backend=self._backend
        )
        return StreamBlockServer(
            outlet=outlet,
            authority=authority,
            me=me,
            security=self._security,
            timings=self._timings,
        )

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Connect and greet; a group is made with the first fetch."""
        frames = await connect_frames(dial, self.name, peer, key, me, self._security, self._timings)
        source = GroupSource(
            self._pairs, peer, memory, backend=self._backend, limits=self._limits, frames=frames
        )
        return StreamSession(frames, Identity.of(key), source, self._timings)

    async def close(self) -> None:
        """Close every group; no session may be open."""
        await self._pairs.close()
