"""The tcp transport: the reference for all others, and the fallback wherever one is missing.

Its fence is exact: only the receiving process writes into its blocks, from one thread, so that a
closed session means that no byte lands any more.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.handoff import GrantedBlock, PeerInfo, TransferKey
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    FetchSession,
    GrantAuthority,
)
from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.stream_hooks import Arrival, BlockOutlet, BlockSource
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames
from kv_transfer.transports.tcp_socket import dial, listen
from kv_transfer.transports.wire import FrameType, Identity


class TcpTransport:
    """Blocks over one TCP connection per transfer."""

    name = "tcp"
    capabilities = CAPABILITIES["tcp"]

    def __init__(
        self,
        *,
        security: LinkSecurity,
        host: str = "127.0.0.1",
        port: int = 0,
        timings: StreamTimings | None = None,
    ) -> None:
        """Servers listen on `host` and `port` (0: any free one); receivers only connect."""
        if security.tls is not None:
            self.capabilities = replace(self.capabilities, data_path="encrypted")
        self._security = security
        self._host = host
        self._port = port
        self._timings = timings or StreamTimings()

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker."""
        return StreamBlockServer(
            outlet=_SocketOutlet(memory, self._host, self._port),
            authority=authority,
            me=me,
            security=self._security,
            timings=self._timings,
        )

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Connect and greet; the answer must come from the incarnation that was asked for."""
        frames = await connect_frames(dial, self.name, peer, key, me, self._security, self._timings)
        return StreamSession(frames, Identity.of(key), _SocketSource(memory), self._timings)

    async def close(self) -> None:
        """Nothing is kept between sessions."""


class _SocketSource(BlockSource):
    """Blocks that come over the socket, behind their headers."""

    kind = FrameType.DATA

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory

    def payload_bytes(self) -> int:
        return self.memory.bytes_per_block

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        await frames.receive_into(self.memory.block(arrival.place))
        arrival.landed()


class _SocketOutlet(BlockOutlet):
    """Blocks that go over the socket, behind their headers."""

    name = "tcp"

    def __init__(self, memory: BlockMemory, host: str, port: int) -> None:
        self.work_bytes = memory.bytes_per_block
        self._memory = memory
        self._host = host
        self._port = port

    def listen(self) -> tuple[socket.socket, str]:
        return listen(self._host, self._port)

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        payload = self._memory.block(block.block_id)
        return wire.block_header(identity, FrameType.DATA, block, payload), payload
