"""The nixl transport: blocks that decode reads out of the prefill worker's memory, over UCX.

For RDMA hardware; without it UCX copies between processes of one host (CMA), or has the owner send
over TCP, so that all of it can be exercised on a CPU. Control goes in the same frames as with tcp,
over a TCP connection for each transfer. The owner's agent introduces itself on it right after the
welcome; then each block is announced with its digest when it is asked for, and decode posts a READ.

The owner checks what shm's does, and as with shm a READ may find what is no longer the transfer's:
it succeeds all the same, and the digest or the confirm throws the bytes away.

The fence is not exact by itself: a READ may write until it is done or its agent is destroyed. So a
session is closed only when all of its READs are done, or the agent has ended (`nixl_link`).

Who connects for control proves itself as with tcp. UCX asks nobody who they are: whoever reaches
the port of its device, and knows where the pool lies, can read it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import GrantedBlock, PeerInfo, TransferKey
from kv_transfer.polling import PollPace
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    CorruptTransferError,
    FetchSession,
    GrantAuthority,
    MemoryKind,
    PeerLostError,
    TransferError,
)
from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.nixl_agent import NixlAgent, Read, RemotePool, require_nixl
from kv_transfer.transports.nixl_link import NixlLink, NixlLinks
from kv_transfer.transports.stream_hooks import (
    Arrival,
    BlockOutlet,
    BlockSource,
    Delivery,
    Say,
)
from kv_transfer.transports.stream_server import StreamBlockServer, StreamTimings
from kv_transfer.transports.stream_session import StreamSession, connect_frames, receive_directions
from kv_transfer.transports.tcp_socket import dial, listen
from kv_transfer.transports.wire import FrameType, Identity

__all__ = ["NixlTransport"]

logger = logging.getLogger(__name__)

_DIRECTIONS = struct.Struct("!QI")
_READ_BYTES = 1 << 20
"""Of one READ: within a host, posting it copies it, and the thread does nothing else meanwhile."""
_WINDOW_BYTES = 4 << 20
"""Of a session's READs under way."""
_PATIENCE_S = 0.5
"""For READs of a session that is closed, before the agent is ended: other transfers share it."""
_KEEP_S = 300.0
_IDLE_POLL_S = 0.1


class NixlTransport:
    """Blocks by READ from a peer's agent; control over one TCP connection per transfer."""

    name = "nixl"
    capabilities = CAPABILITIES["nixl"]

    def __init__(
        self,
        *,
        security: LinkSecurity,
        host: str = "127.0.0.1",
        device: str | None = "lo",
        ucx_options: Mapping[str, str] | None = None,
        timings: StreamTimings | None = None,
        keep_s: float = _KEEP_S,
    ) -> None:
        """Control listens on `host`, UCX uses and listens on `device` alone (None: on all).

        `ucx_options` are UCX's own, without their prefix, such as TLS. Raises NixlMissingError
        where the optional package is not installed.
        """
        require_nixl()
        self._security = security
        self._host = host
        only = {} if device is None else {"NET_DEVICES": device}
        self._options = only | dict(ucx_options or {})
        self._timings = timings or StreamTimings()
        # The first READ of a link connects as well.
        stall_s = self._timings.connect_s + self._timings.silence_s
        self._links = NixlLinks(self._options, stall_s=stall_s, keep_s=keep_s)

    def try_start(self) -> None:
        """Start an agent and end it: the first one of a process takes half a second.

        OSError if UCX cannot start here: its device may not exist.
        """
        NixlAgent("trial", _TrialMemory(), self._options).close()

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        """A server for the blocks of a prefill worker; its agent starts with it."""
        return StreamBlockServer(
            outlet=_AgentOutlet(memory, self._host, me, self._options),
            authority=authority,
            me=me,
            security=self._security,
            timings=self._timings,
        )

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        """Connect, greet, and make the owner's agent known unless it is."""
        identity = Identity.of(key)
        frames = await connect_frames(dial, self.name, peer, key, me, self._security, self._timings)
        try:
            directions = await receive_directions(frames, identity, self._timings)
            remote = _unpack_directions(directions, peer.bytes_per_block)
            link = await self._links.enter(me, peer, remote, memory)
        except BaseException:
            frames.close()
            raise
        source = _AgentSource(self._links, link, memory)
        return StreamSession(frames, identity, source, self._timings)

    async def close(self) -> None:
        """End every agent that reads; no session may be open."""
        await self._links.close()


class _TrialMemory:
    """A pool of one block."""

    bytes_per_block = 4096
    num_blocks = 1
    kind: MemoryKind = "host"
    region = None

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(self.bytes_per_block))

    def block(self, block_id: BlockId) -> memoryview:
        return self._bytes


class _AgentDelivery(Delivery):
    """Frames are all there is, as long as the agent does its part."""

    def __init__(self, failure: asyncio.Future[None]) -> None:
        self._failure = failure

    async def run(self) -> None:
        await asyncio.shield(self._failure)  # others wait for it too


class _AgentOutlet(BlockOutlet):
    """Blocks that stay where they are; a frame says that one is there, and its digest."""

    name = "nixl"

    def __init__(
        self, memory: BlockMemory, host: str, me: PeerInfo, options: Mapping[str, str]
    ) -> None:
        self.work_bytes = memory.bytes_per_block
        self._memory = memory
        self._host = host
        self._agent_name = f"{me.worker_id}:{me.incarnation}"
        self._options = options
        self._agent: NixlAgent | None = None
        self._directions = b""
        self._polling: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None]  # from the start on: what those under way end by
        self._is_failing = False
        self._pace = PollPace(idle_s=_IDLE_POLL_S, clock=time.monotonic)
        self._stirred = asyncio.Event()

    async def start(self) -> None:
        """Start the agent, and do from now on what its readers need of this process."""
        agent = self._agent = await asyncio.to_thread(
            NixlAgent, self._agent_name, self._memory, self._options
        )
        head = _DIRECTIONS.pack(agent.address, agent.num_blocks)
        self._directions = head + agent.metadata()
        self._failure = asyncio.get_running_loop().create_future()
        self._polling = asyncio.create_task(self._poll(agent))
        self._polling.add_done_callback(self._polling_ended)

    def listen(self) -> tuple[socket.socket, str]:
        return listen(self._host, 0)

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        self._pace.stir()
        self._stirred.set()
        content = self._memory.block(block.block_id)
        return (wire.block_header(identity, FrameType.LOCATED, block, content),)

    def delivery(self, key: TransferKey, say: Say) -> Delivery:
        """Says where the blocks are; ends by the agent's failure if there is one."""
        say(FrameType.DIRECTIONS, self._directions)
        return _AgentDelivery(self._failure)

    async def close(self) -> None:
        """End the agent."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        if self._agent is not None:
            self._agent.close()

    async def _poll(self, agent: NixlAgent) -> None:
        """Without it no READ over TCP moves."""
        while True:
            is_polled = self._try_poll(agent)
            self._stirred.clear()
            delay_s = self._pace.delay_s() if is_polled else _IDLE_POLL_S
            if not delay_s:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(delay_s):
                    await self._stirred.wait()
            except TimeoutError:
                continue

    def _try_poll(self, agent: NixlAgent) -> bool:
        """Poll, or end what is under way; those to come are tried anew."""
        try:
            agent.poll()
        except OSError as error:
            if not self._is_failing:  # told once, not ten times a second
                logger.warning("agent failed name=%s", self._agent_name, exc_info=error)
            self._is_failing = True
            self._end_transfers(f"the owner's agent: {error}")
            self._failure = asyncio.get_running_loop().create_future()
            return False
        self._is_failing = False
        return True

    def _end_transfers(self, why: str) -> None:
        """End all that are under way."""
        self._failure.set_exception(PeerLostError(why))
        self._failure.exception()  # seen, where there are none

    def _polling_ended(self, polling: asyncio.Task[None]) -> None:
        """By our own fault: transfers to come end by it too, rather than waiting for READs."""
        if not polling.cancelled() and (error := polling.exception()) is not None:
            logger.error("polling for readers failed", exc_info=error)
            self._end_transfers(f"internal error of the owner: {error!r}")


class _AgentSource(BlockSource):
    """Blocks that are read by a link's agent, many by one READ."""

    kind = FrameType.LOCATED

    def __init__(self, links: NixlLinks, link: NixlLink, memory: BlockMemory) -> None:
        self.memory = memory
        self._links = links
        self._link = link
        self._announced: list[Arrival] = []
        self._under_way: set[Read] = set()
        self._bytes_under_way = 0
        self._has_room = asyncio.Event()
        self._is_closed = False

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        self._link.check(arrival.block.block_id)
        if not self._announced:
            asyncio.get_running_loop().call_soon(self._read_announced)
        self._announced.append(arrival)
        self._bytes_under_way += self.memory.bytes_per_block
        if self._bytes_announced() >= _READ_BYTES:
            self._read_announced()
        while self.is_full():
            self._has_room.clear()
            await self._has_room.wait()
        await frames.pace(self.memory.bytes_per_block)

    def is_full(self) -> bool:
        """READs that stall are the link's to notice; those that only take long are none of that."""
        return self._bytes_under_way >= _WINDOW_BYTES

    async def close(self, failure: TransferError | None) -> None:
        self._is_closed = True
        self._announced.clear()
        try:
            await self._link.settle(tuple(self._under_way), _PATIENCE_S)
        finally:
            self._links.leave(self._link, peer_is_lost=isinstance(failure, PeerLostError))

    def _bytes_announced(self) -> int:
        return len(self._announced) * self.memory.bytes_per_block

    def _read_announced(self) -> None:
        arrivals, self._announced = self._announced, []
        if not arrivals or self._is_closed:
            return
        pieces = [
            (arrival.block.block_id, self.memory.block(arrival.place)) for arrival in arrivals
        ]
        read = self._link.read(pieces, lambda error: self._end(arrivals, error))
        if read is not None:
            self._under_way.add(read)

    def _end(self, arrivals: Sequence[Arrival], error: TransferError | None) -> None:
        self._bytes_under_way -= len(arrivals) * self.memory.bytes_per_block
        self._has_room.set()
        if self._is_closed:
            return
        for arrival in arrivals:
            try:
                if error is not None:
                    raise error
                arrival.landed()
            except TransferError as failure:
                arrival.failed(failure)
                return


def _unpack_directions(payload: bytes, bytes_per_block: int) -> RemotePool:
    """Inverse of what the owner's outlet says; raises `CorruptTransferError`."""
    if len(payload) <= _DIRECTIONS.size:
        raise CorruptTransferError(f"directions of {len(payload)} bytes")
    address, num_blocks = _DIRECTIONS.unpack_from(payload)
    return RemotePool(
        metadata=payload[_DIRECTIONS.size :],
        address=address,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
    )
