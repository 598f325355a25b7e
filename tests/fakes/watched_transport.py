"""Watches destination blocks: which of them a session may still write to, and who frees one."""

from __future__ import annotations

import copy
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import Grant, GrantedBlock, PeerInfo, TransferKey, Verdict
from kv_transfer.transport import BlockMemory, BlockServer, FetchSession, GrantAuthority, Transport
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from workers.engine.block_pool import BlockPool

DAMAGES = frozenset({FaultKind.TRUNCATE, FaultKind.CORRUPT})


class WatchedTransport:
    """A `Transport` around another; the faulty one gets faults for each session of its own."""

    def __init__(
        self, base: Transport, faults_of: Callable[[int], Sequence[Fault]] | None = None
    ) -> None:
        """`faults_of` says what the n-th session suffers; for a `FaultyTransport` only."""
        self.name = base.name
        self.capabilities = base.capabilities
        self.base = base
        self.num_sessions = 0
        self.connected = threading.Event()
        """Set when a session is open."""
        self.fetching = threading.Event()
        """Set when a session has begun to fetch."""
        self.violations: list[str] = []
        """Blocks that were freed while a session could still write to them."""
        self.pool_memory: BlockMemory | None = None
        """The pool that is watched, where sessions write to other memory too; None is any."""
        self.close_error: BaseException | None = None
        """Raised where a session should have passed its fence."""
        self._faults_of = faults_of
        self._writers: dict[BlockId, TransferKey] = {}

    @property
    def faulty(self) -> FaultyTransport:
        """The transport below, where it is the faulty one."""
        assert isinstance(self.base, FaultyTransport)
        return self.base

    def server(self, memory: BlockMemory, authority: GrantAuthority, me: PeerInfo) -> BlockServer:
        return self.base.server(memory, authority, me)

    async def connect(
        self, memory: BlockMemory, peer: PeerInfo, key: TransferKey, me: PeerInfo
    ) -> FetchSession:
        number = self.num_sessions
        self.num_sessions += 1
        base = self.base
        if self._faults_of is not None:
            base = copy.copy(self.faulty)  # the same servers and events
            faults = self._faults_of(number)
            base.faults = {f.piece: f.kind for f in faults if f.kind not in DAMAGES}
            base.damages = {f.piece: f.kind for f in faults if f.kind in DAMAGES}
        session = await base.connect(memory, peer, key, me)
        self.connected.set()
        if self.pool_memory is not None and memory is not self.pool_memory:
            return session
        return _WatchedSession(self, session, key)

    async def close(self) -> None:
        await self.base.close()

    def begins(self, key: TransferKey, block_ids: Sequence[BlockId]) -> None:
        """A session may write to these blocks from now on."""
        self._writers.update(dict.fromkeys(block_ids, key))
        self.fetching.set()

    def ends(self, key: TransferKey) -> None:
        """A session has passed its fence."""
        for block_id in [block for block, writer in self._writers.items() if writer == key]:
            del self._writers[block_id]

    def freed(self, block_ids: Sequence[BlockId]) -> None:
        """A pool frees blocks."""
        written_to = [block_id for block_id in block_ids if block_id in self._writers]
        if written_to:
            self.violations.append(f"INV-FENCE: blocks {written_to} were freed before the fence")


class WatchedPool(BlockPool):
    """A pool that tells the transport what it frees."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        window_blocks: int,
        sliding_windows: Sequence[int | None],
        transport: WatchedTransport | None,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            window_blocks=window_blocks,
            sliding_windows=sliding_windows,
        )
        self._transport = transport

    def release(self, block_ids: Sequence[BlockId]) -> None:
        if self._transport is not None:
            self._transport.freed(block_ids)
        super().release(block_ids)


class _WatchedSession:
    def __init__(self, watch: WatchedTransport, session: FetchSession, key: TransferKey) -> None:
        self._watch = watch
        self._session = session
        self._key = key

    def grants(self) -> AsyncIterator[Grant]:
        return self._session.grants()

    def fetch(
        self, blocks: Sequence[GrantedBlock], placement: Mapping[LogicalBlock, BlockId]
    ) -> AsyncIterator[GrantedBlock]:
        self._watch.begins(self._key, [placement[block.logical] for block in blocks])
        return self._session.fetch(blocks, placement)

    async def renew(self) -> None:
        await self._session.renew()

    async def confirm(self) -> Verdict:
        return await self._session.confirm()

    async def release(self) -> None:
        await self._session.release()

    async def close(self) -> None:
        await self._session.close()
        if self._watch.close_error is not None:
            raise self._watch.close_error
        self._watch.ends(self._key)
