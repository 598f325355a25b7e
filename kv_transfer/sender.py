"""The prefill worker's side of hand-offs: grants blocks, answers receivers, ends every lease.

The worker opens a transfer, grants blocks as they become final, and may free them only when
`on_end` was called for the transfer: by then no lease covers them and no byte of them is being
sent. Receivers are answered by the transfer thread, whatever the worker's loop is doing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kv_transfer.compatibility import check_compatible
from kv_transfer.geometry import BlockId
from kv_transfer.handoff import (
    FirstToken,
    Grant,
    GrantedBlock,
    PeerInfo,
    ReleaseReason,
    TransferKey,
    Verdict,
)
from kv_transfer.lease import LeaseTable
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.readers import Ended, Readers
from kv_transfer.selection import Offer, check_memory
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockMemory, BlockServer, Clock, LinkRefusedError, Transport

logger = logging.getLogger(__name__)

OnEnd = Callable[[TransferKey, ReleaseReason], None]
"""Called exactly once per opened transfer; from then on its blocks may be freed.

Of transfers that were opened together it is called when all of them have ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """Counters of one sender since its start."""

    active_leases: int
    opened: int
    refused: int
    """Opens and connections that were not accepted."""
    strangers: int
    """Connections that ended before they had proved to belong to this deployment."""
    renewals: int
    ended: Mapping[ReleaseReason, int]
    confirms: Mapping[Verdict, int]
    blocks_confirmed: int
    bytes_confirmed: Mapping[str, int]
    """By transport; each that is offered has an entry."""


class KVSender:
    """Hands over blocks of one pool; its methods are for the worker's event loop."""

    def __init__(
        self,
        *,
        memory: BlockMemory,
        me: PeerInfo,
        generation_of: Callable[[BlockId], int],
        transports: Sequence[Transport],
        on_end: OnEnd,
        lease_s: float = 5.0,
        clock: Clock = time.monotonic,
        sweep_s: float = 0.25,
    ) -> None:
        """Prepare to serve `memory`; `generation_of` must be safe to call from another thread.

        Raises `LinkRefusedError` if no transport moves blocks of such memory.
        """
        check_memory([Offer.of(transport) for transport in transports], memory.kind)
        self._memory = memory
        self._me = me
        self._transports = tuple(transports)
        self._sweep_s = sweep_s
        self._thread = TransferThread(f"kv-sender-{me.worker_id}")
        table = LeaseTable(incarnation=me.incarnation, generation_of=generation_of, lease_s=lease_s)
        self._authority = _Authority(table, self._thread, me, on_end, clock)
        self._servers: tuple[BlockServer, ...] = ()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> PeerInfo:
        """Start the transfer thread and all servers; returns `me` with its endpoints."""
        self._authority.worker_loop = asyncio.get_running_loop()
        await self._thread.start()
        addresses = await self._thread.run(self._start_servers())
        names = (transport.name for transport in self._transports)
        self._me = replace(self._me, endpoints=tuple(zip(names, addresses, strict=True)))
        return self._me

    def open(
        self, key: TransferKey, decode: PeerInfo, *, first_blocks: tuple[int, ...] = (0,)
    ) -> None:
        """Start the lease of a transfer to `decode`, which needs blocks from `first_blocks` on.

        Raises `LinkRefusedError` if the workers do not fit each other, the key is for another
        process, or its epoch is not a new one. Nothing is held then and `on_end` is not called.
        """
        self.open_together({key: decode}, first_blocks=first_blocks)

    def open_together(
        self, readers: Mapping[TransferKey, PeerInfo], *, first_blocks: tuple[int, ...] = (0,)
    ) -> None:
        """Start a lease for each of several workers that will read the same blocks.

        As the ranks of a tensor-parallel decode worker do, each its heads. Every one is granted,
        renewed, confirmed and ended for itself; none of their ends is told to `on_end` before the
        last. Raises as `open`, and then no lease was started.
        """
        self._authority.open(readers, first_blocks)

    def grant(
        self,
        key: TransferKey,
        blocks: Sequence[GrantedBlock],
        first: FirstToken | None,
        *,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Let the receiver read blocks that are final; `first` makes it the last grant.

        False if the transfer has ended: prefill has no reason to go on with it.
        """
        return self._authority.grant(key, blocks, first, prompt_logprobs=prompt_logprobs)

    def revoke(self, key: TransferKey, reason: str) -> None:
        """Take the blocks back; `reason` is told to the receiver. Safe to repeat."""
        self._authority.revoke(key, reason)

    @property
    def healthy(self) -> bool:
        """Whether the transfer thread does what it is asked; see `TransferThread.is_hung`."""
        return not self._thread.is_hung

    def stats(self) -> SenderStats:
        """Counters as they are now."""
        names = [transport.name for transport in self._transports]
        return self._authority.stats(names, self._memory.bytes_per_block)

    async def close(self) -> None:
        """Revoke every transfer, drop every receiver, end the thread; safe to repeat."""
        await self._thread.close(self._shut_down)

    async def _start_servers(self) -> list[str]:
        self._servers = tuple(
            transport.server(self._memory, self._authority, self._me)
            for transport in self._transports
        )
        addresses = [await server.start() for server in self._servers]
        self._sweeper = asyncio.create_task(self._sweep())
        return addresses

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            self._authority.sweep()

    async def _shut_down(self) -> None:
        self._authority.revoke_all("the prefill worker is closing")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        for server in self._servers:
            await server.close()


class _Authority:
    """The lease table between two threads: `GrantAuthority` for servers, and the worker's calls.

    A lock guards the table, held for dictionary work alone. That a transfer has ended is announced
    by the transfer thread only: while that thread runs the announcement it is not sending, so that
    freed blocks can never be on their way out.
    """

    def __init__(
        self,
        table: LeaseTable,
        thread: TransferThread,
        me: PeerInfo,
        on_end: OnEnd,
        clock: Clock,
    ) -> None:
        self._table = table
        self._thread = thread
        self._me = me
        self._on_end = on_end
        self._clock = clock
        self._lock = threading.Lock()
        self._readers = Readers()
        self._changed: dict[TransferKey, asyncio.Event] = {}  # the transfer thread's
        self._granted_blocks: Counter[TransferKey] = Counter()
        self._transport_of: dict[TransferKey, str] = {}
        self._ended: Counter[ReleaseReason] = Counter()
        self._confirms: Counter[Verdict] = Counter()
        self._opened = 0
        self._refused = 0
        self._strangers = 0
        self._renewals = 0
        self._blocks_confirmed: Counter[str] = Counter()  # by transport
        self.worker_loop: asyncio.AbstractEventLoop | None = None

    # Called by the worker.

    def open(self, readers: Mapping[TransferKey, PeerInfo], first_blocks: tuple[int, ...]) -> None:
        with self._lock:
            try:
                self._check_readers(readers)
            except LinkRefusedError:
                self._refused += 1
                raise
            now = self._clock()
            for key in readers:
                self._table.open(key, now, first_blocks=first_blocks)
            self._readers.begin(tuple(readers))
            self._opened += len(readers)
        self._thread.post(self._announce)  # an older attempt may have ended by it

    def grant(
        self,
        key: TransferKey,
        blocks: Sequence[GrantedBlock],
        first: FirstToken | None,
        *,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        with self._lock:
            try:
                is_live = self._table.extend(
                    key, blocks, first, self._clock(), prompt_logprobs=prompt_logprobs
                )
            except LinkRefusedError:  # superseded, or ended so long ago that it is forgotten
                is_live = False
            if is_live:
                self._granted_blocks[key] += len(blocks)
        if is_live:
            self._thread.post(self._wake, key)
        else:
            self._thread.post(self._announce)
        return is_live

    def revoke(self, key: TransferKey, why: str) -> None:
        with self._lock:
            self._table.revoke(key, why, self._clock())
        self._thread.post(self._announce)

    def stats(self, transports: Sequence[str], bytes_per_block: int) -> SenderStats:
        with self._lock:
            return SenderStats(
                active_leases=self._table.num_live,
                opened=self._opened,
                refused=self._refused,
                strangers=self._strangers,
                renewals=self._renewals,
                ended=dict(self._ended),
                confirms=dict(self._confirms),
                blocks_confirmed=self._blocks_confirmed.total(),
                bytes_confirmed={
                    name: self._blocks_confirmed[name] * bytes_per_block for name in transports
                },
            )

    # Called by the transfer thread.

    def attach(self, key: TransferKey, peer: PeerInfo, transport: str) -> None:
        with self._lock:
            try:
                self._check_peer(key, peer)
                self._table.attach(key, self._clock())
            except LinkRefusedError:
                self._refused += 1
                raise
            self._transport_of[key] = transport
        self._changed[key] = asyncio.Event()

    async def grants(self, key: TransferKey) -> AsyncIterator[Grant]:
        sent = 0
        changed = self._changed.get(key) or asyncio.Event()  # gone: it has ended, as is found next
        while True:
            changed.clear()
            with self._lock:
                grants = self._table.grants_from(key, sent, self._clock())
            for grant in grants:
                yield grant
                if grant.is_last:
                    return
            sent += len(grants)
            await changed.wait()

    def authorize(self, key: TransferKey, blocks: Sequence[GrantedBlock]) -> None:
        with self._lock:
            self._table.authorize(key, blocks, self._clock())

    def renew(self, key: TransferKey) -> None:
        with self._lock:
            self._table.renew(key, self._clock())
            self._renewals += 1

    def confirm(self, key: TransferKey) -> Verdict:
        with self._lock:
            verdict = self._table.confirm(key, self._clock())
            self._confirms[verdict] += 1
        self._announce()
        return verdict

    def release(self, key: TransferKey, reason: ReleaseReason) -> None:
        with self._lock:
            self._table.release(key, reason, self._clock())
        self._announce()

    def note_stranger(self) -> None:
        with self._lock:
            self._strangers += 1

    def sweep(self) -> None:
        with self._lock:
            expired = self._table.sweep(self._clock())
        for key in expired:
            logger.warning("lease expired transfer_id=%s epoch=%d", key.transfer_id, key.epoch)
        self._announce()

    def revoke_all(self, why: str) -> None:
        with self._lock:
            for key in self._table.live_keys():
                self._table.revoke(key, why, self._clock())
        self._announce()

    def _check_readers(self, readers: Mapping[TransferKey, PeerInfo]) -> None:
        for key, decode in readers.items():
            self._check_peer(key, decode)
            self._table.check_new(key)
        if len({key.transfer_id for key in readers}) < len(readers):
            raise LinkRefusedError("two ranks of a decode worker name one transfer id")

    def _check_peer(self, key: TransferKey, decode: PeerInfo) -> None:
        check_compatible(self._me, decode)
        if key.decode_incarnation != decode.incarnation:
            raise LinkRefusedError(
                f"transfer {key.transfer_id} is for incarnation {key.decode_incarnation}, "
                f"{decode.worker_id} is {decode.incarnation}"
            )

    def _announce(self) -> None:
        with self._lock:
            ended = self._table.take_ended()
            freed: list[Ended] = []
            for key, reason in ended:
                freed += self._readers.end(key, reason)
                self._ended[reason] += 1
                granted = self._granted_blocks.pop(key, 0)
                transport = self._transport_of.pop(key, None)
                if reason is ReleaseReason.CONFIRMED and transport is not None:
                    self._blocks_confirmed[transport] += granted
        for key, _ in ended:
            self._wake(key)
            self._changed.pop(key, None)
        for key, reason in freed:
            assert self.worker_loop is not None, "a transfer was opened before start"
            self.worker_loop.call_soon_threadsafe(self._on_end, key, reason)

    def _wake(self, key: TransferKey) -> None:
        changed = self._changed.get(key)
        if changed is not None:
            changed.set()
