"""A transport within one process that does to a transfer what a test tells it to.

Pieces are what a receiver gets: grants, blocks and the verdict, numbered from 0 in the order in
which the session hands them over. A fault names the piece that it hits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, TypeVarTuple

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import Grant, GrantedBlock, PeerInfo, ReleaseReason, TransferKey, Verdict
from kv_transfer.transport import (
    BlockMemory,
    BlockServer,
    Capabilities,
    CorruptTransferError,
    FetchSession,
    GrantAuthority,
    PeerLostError,
    TransferError,
)
from tests.fakes.until import until

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class FaultKind(Enum):
    """What happens to a piece."""

    DROP = "drop"
    """It never comes; the next piece does."""
    DUPLICATE = "duplicate"
    """It comes twice."""
    REORDER = "reorder"
    """It comes after the next piece of its kind (a block or a grant that has one)."""
    TRUNCATE = "truncate"
    """Half of a block's bytes come, and the transport notices."""
    CORRUPT = "corrupt"
    """A block comes with a changed byte, and the transport notices."""
    DIE = "die"
    """The connection ends before it."""
    HANG = "hang"
    """Nothing comes any more, while the connection stays."""
    DELAY = "delay"
    """It comes when the test calls `resume`."""


_DAMAGES = frozenset({FaultKind.TRUNCATE, FaultKind.CORRUPT})


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one piece of a session; damages count blocks alone."""

    kind: FaultKind
    piece: int


class FaultyTransport:
    """A `Transport` whose servers and sessions share one process; give both sides the same one."""

    name = "faulty"
    capabilities = Capabilities(
        one_sided=True,
        peer_must_poll=False,
        fence="on_close",
        memory_kinds=frozenset({"host"}),
        data_path="host",
        cross_host=False,
    )

    def __init__(self, *faults: Fault) -> None:
        self.faults = {f.piece: f.kind for f in faults if f.kind not in _DAMAGES}
        self.damages = {f.piece: f.kind for f in faults if f.kind in _DAMAGES}
        self.reached = threading.Event()
        """Set when a piece with a DELAY or HANG is due."""
        self.closing = threading.Event()
        """Set when a session has begun to close."""
        self.renewals = 0
        self.refuse_renewals: TransferError | None = None
        self.lost: set[str] = set()
        """What a receiver asks, by the method's name, and its owner never hears."""
        self._resume = threading.Event()
        self._fence = threading.Event()
        self._fence.set()
        self._servers: dict[str, _Server] = {}

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        return _Server(self._servers, memory, authority)

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        server = self._servers.get(peer.endpoint(self.name) or "")
        if server is None:
            raise PeerLostError("nobody listens")
        await server.call(server.authority.attach, key, me, self.name)
        return _Session(self, server, memory, key)

    async def close(self) -> None:
        return

    def resume(self) -> None:
        """Let delayed pieces go."""
        self._resume.set()

    def hold_fence(self) -> None:
        """Keep every `close` from returning until `pass_fence`: a write is still in flight."""
        self._fence.clear()

    def pass_fence(self) -> None:
        """Let sessions close."""
        self._fence.set()

    async def wait_reached(self) -> None:
        """Return once a piece with a DELAY or HANG is due."""
        await _wait(self.reached)

    async def wait_closing(self) -> None:
        """Return once a session has begun to close."""
        await _wait(self.closing)

    async def wait_resumed(self) -> None:
        await _wait(self._resume)

    async def wait_fence(self) -> None:
        self.closing.set()
        await _wait(self._fence)


class _Server:
    def __init__(
        self, servers: dict[str, _Server], memory: BlockMemory, authority: GrantAuthority
    ) -> None:
        self._servers = servers
        self.memory = memory
        self.authority = authority
        self.loop: asyncio.AbstractEventLoop | None = None
        self._address = ""
        # A call that a loop gets between its last turn and its end is neither run nor refused:
        # whatever is asked before `close` is asked in time, whatever after it not at all.
        self._guard = threading.Lock()
        self._is_closed = False

    async def start(self) -> str:
        self.loop = asyncio.get_running_loop()
        self._address = f"faulty-{len(self._servers)}"
        self._servers[self._address] = self
        return self._address

    async def close(self) -> None:
        self._servers.pop(self._address, None)
        with self._guard:
            self._is_closed = True

    async def call(
        self, function: Callable[[*Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Call the authority from its own thread, as every server must."""

        async def body() -> Result:
            return function(*arguments)

        return await self.run(body())

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run something on the owner's loop; the peer is lost if that has ended."""
        assert self.loop is not None
        with self._guard:
            if self._is_closed:
                coroutine.close()
                raise PeerLostError("the owner has stopped")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is not None and waiter.cancelling():
                raise
            raise PeerLostError("the owner stopped meanwhile") from None


class _Session:
    def __init__(
        self, transport: FaultyTransport, server: _Server, memory: BlockMemory, key: TransferKey
    ) -> None:
        self._transport = transport
        self._server = server
        self._memory = memory
        self._key = key
        self._pieces = 0
        self._blocks = 0
        self._has_died = False

    async def grants(self) -> AsyncIterator[Grant]:
        source = self._owner_grants()
        async for grant in self._faulty(source):
            yield grant

    async def fetch(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        async for block in self._faulty(self._read(blocks, placement)):
            yield block

    async def renew(self) -> None:
        self._check_alive()
        if self._transport.refuse_renewals is not None:
            raise self._transport.refuse_renewals
        if "renew" in self._transport.lost:
            return
        await self._server.call(self._server.authority.renew, self._key)
        self._transport.renewals += 1

    async def confirm(self) -> Verdict:
        if "confirm" in self._transport.lost:
            await asyncio.Event().wait()

        async def ask() -> AsyncIterator[Verdict]:
            yield await self._server.call(self._server.authority.confirm, self._key)

        async for verdict in self._faulty(ask()):
            return verdict
        return await asyncio.Event().wait()  # type: ignore[return-value]  # dropped: never comes

    async def release(self) -> None:
        if not self._has_died and "release" not in self._transport.lost:
            await self._end(ReleaseReason.RELEASED)

    async def close(self) -> None:
        await self._transport.wait_fence()
        await self._end(ReleaseReason.PEER_LOST)

    async def _end(self, reason: ReleaseReason) -> None:
        try:
            await self._server.call(self._server.authority.release, self._key, reason)
        except PeerLostError:
            return

    async def _owner_grants(self) -> AsyncIterator[Grant]:
        iterator = await self._server.call(self._server.authority.grants, self._key)
        while True:
            step: Any = anext(iterator)
            try:
                grant = await self._server.run(_await(step))
            except StopAsyncIteration:
                return
            assert grant is not None
            yield grant
            if grant.is_last:
                return

    async def _read(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        for block in blocks:
            await self._server.call(self._server.authority.authorize, self._key, (block,))
            source = self._server.memory.block(block.block_id)
            destination = self._memory.block(placement[block.logical])
            fault = self._transport.damages.get(self._blocks)
            self._blocks += 1
            if fault is FaultKind.TRUNCATE:
                destination[: destination.nbytes // 2] = source[: destination.nbytes // 2]
                raise CorruptTransferError("a block came short")
            destination[:] = source
            if fault is FaultKind.CORRUPT:
                destination[0] ^= 1
                raise CorruptTransferError("a block's digest is wrong")
            yield block

    async def _faulty(self, pieces: AsyncIterator[Result]) -> AsyncIterator[Result]:
        held: list[Result] = []
        async for piece in pieces:
            self._check_alive()
            fault = self._transport.faults.get(self._pieces)
            self._pieces += 1
            if fault is FaultKind.DROP:
                continue
            if fault is FaultKind.REORDER:
                held.append(piece)
                continue
            await self._stall(fault)
            yield piece
            if fault is FaultKind.DUPLICATE:
                yield piece
            while held:
                yield held.pop()
        while held:
            yield held.pop()

    async def _stall(self, fault: FaultKind | None) -> None:
        if fault is FaultKind.DIE:
            self._has_died = True
            self._check_alive()
        if fault is FaultKind.HANG:
            self._transport.reached.set()
            await asyncio.Event().wait()
        if fault is FaultKind.DELAY:
            self._transport.reached.set()
            await self._transport.wait_resumed()

    def _check_alive(self) -> None:
        if self._has_died:
            raise PeerLostError("the connection has ended")


async def _await(step: Any) -> Any:
    try:
        return await step
    except StopAsyncIteration:
        return None


async def _wait(event: threading.Event) -> None:
    """Wait for an event of another thread, without one of our own."""
    await until(event.is_set, timeout_s=50.0)
