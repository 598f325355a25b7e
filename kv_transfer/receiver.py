"""The decode worker's side of hand-offs: pulls granted blocks into places that it reserved.

`pull` returns only after the owner said VALID; any other end raises, and then the destination
blocks belong to the transfer until `wait_quiesced` has returned. Each transfer has one task on the
transfer thread; leases are renewed there, whatever the worker's loop is doing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from kv_transfer.compatibility import block_shape, check_compatible
from kv_transfer.durations import HANDOFF_BOUNDS_S, DurationCounts, Durations
from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.landing import InPlace, Landing, Repacked
from kv_transfer.protocol import ReceiverProtocol
from kv_transfer.pull import Pull, PullOrder
from kv_transfer.selection import Choice, Offer, choose
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import (
    BlockMemory,
    Clock,
    CorruptTransferError,
    InvalidTransferError,
    Landed,
    LeaseLostError,
    LinkRefusedError,
    NotAuthenticatedError,
    PeerLostError,
    TransferDeadlineError,
    Transport,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RENEWALS_PER_LEASE = 5
"""So that a lease survives four renewals lost or late in a row."""

OUTCOMES: Mapping[type[BaseException], str] = MappingProxyType(
    {
        LinkRefusedError: "link_refused",
        NotAuthenticatedError: "not_authenticated",
        PeerLostError: "peer_lost",
        TransferDeadlineError: "deadline",
        LeaseLostError: "lease_lost",
        CorruptTransferError: "corrupt",
        InvalidTransferError: "invalid",
        asyncio.CancelledError: "cancelled",
    }
)
"""How a failed pull is counted; a landed one is `landed`, any other failure `internal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """Counters of one receiver since its start."""

    active: int
    by_outcome: Mapping[str, int]
    """Ended pulls: `landed`, or what they failed by (`OUTCOMES`)."""
    blocks_published: int
    bytes_published: Mapping[str, int]
    """By transport; each that this worker has, has an entry."""
    links: Mapping[str, Choice]
    """The transport that was last chosen for each peer, by worker id, and why."""
    digests_checked: int
    """Blocks that landed and were verified, those of failed transfers included."""
    fetch: DurationCounts
    """`Landed.fetch_s` of landed transfers."""
    wait: DurationCounts
    """`Landed.wait_s` of landed transfers."""


class KVReceiver:
    """Pulls KV into one pool; its methods are for the worker's event loop."""

    def __init__(
        self,
        *,
        memory: BlockMemory,
        me: PeerInfo,
        transports: Sequence[Transport],
        broken: Sequence[Offer] = (),
        lease_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare to write into `memory`, over the best of `transports` that a peer allows.

        They are named best first; `broken` would come before the last one, but do not start here.
        `lease_s` is the one that prefill workers grant.
        """
        self._memory = memory
        self._me = me
        self._transports = {transport.name: transport for transport in transports}
        usable = [Offer.of(transport) for transport in transports]
        self._offers = (*usable[:-1], *broken, *usable[-1:])
        self._links: dict[str, Choice] = {}
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._thread = TransferThread(f"kv-receiver-{me.worker_id}")
        self._ledger = _Ledger(tuple(self._transports))

    async def start(self) -> None:
        """Start the transfer thread."""
        await self._thread.start()

    def transfer(
        self,
        peer: PeerInfo,
        key: TransferKey,
        placement: Sequence[BlockId],
        num_tokens: int,
        deadline_s: float,
        *,
        first_blocks: tuple[int, ...] = (0,),
    ) -> IncomingTransfer:
        """Prepare to pull `num_tokens` tokens, the i-th missing block into `placement[i]`.

        Missing are, group by group, the prompt's blocks from the index in `first_blocks` on:
        blocks of this worker's size, whatever the peer's are.
        Nothing is asked for before `pull`. Raises `LinkRefusedError` if the workers do not fit
        each other or have no transport in common, ValueError for a placement that is too short,
        names a block twice, or is outside the pool.
        """
        check_compatible(prefill=peer, decode=self._me)
        outside = [block for block in placement if not 0 <= block < self._memory.num_blocks]
        if outside:
            raise ValueError(f"blocks {outside} of {self._memory.num_blocks} in the placement")
        landing: Landing = InPlace(self._memory)
        if peer.block_size != self._me.block_size:
            landing, placement, first_blocks = self._repacked(
                peer, placement, num_tokens, first_blocks
            )
        order = PullOrder(
            transport=self._transport_to(peer, self._offers_for(peer)),
            landing=landing,
            peer=peer,
            key=key,
            me=self._me,
            num_tokens=num_tokens,
            renew_every_s=self._renew_every_s,
            deadline_s=deadline_s,
        )
        protocol = ReceiverProtocol(
            num_tokens=num_tokens,
            block_size=peer.block_size,
            placement=placement,
            first_blocks=first_blocks,
        )
        pull = Pull(order, protocol, self._clock)
        return IncomingTransfer(pull, self._thread, self._ledger)

    def stats(self) -> ReceiverStats:
        """Counters as they are now."""
        return self._ledger.stats(self._links)

    def _repacked(
        self,
        peer: PeerInfo,
        placement: Sequence[BlockId],
        num_tokens: int,
        first_blocks: tuple[int, ...],
    ) -> tuple[Landing, Sequence[BlockId], tuple[int, ...]]:
        """A landing for blocks of the peer's size; what is expected, and covered, is those.

        The protocol's placement only numbers them: where their tokens go, the landing knows.
        """
        (first_block,) = first_blocks  # several groups are not repacked
        first_token = first_block * self._me.block_size
        landing = Repacked(
            self._memory,
            placement,
            source=block_shape(peer),
            own=block_shape(self._me),
            first_token=first_token,
            num_tokens=num_tokens,
        )
        num_theirs = ceil_div(num_tokens, peer.block_size)
        numbers = [BlockId(number) for number in range(num_theirs)]
        return landing, numbers, (first_token // peer.block_size,)

    async def close(self) -> None:
        """Abort every transfer, wait for its fence, end the thread; safe to repeat."""
        if self._thread.is_running:
            await self._thread.run(self._shut_down())
        await self._thread.stop()

    async def _shut_down(self) -> None:
        await self._ledger.end_all()
        for transport in self._transports.values():
            await transport.close()

    def _offers_for(self, peer: PeerInfo) -> Sequence[Offer]:
        """The transports that can bring its blocks; `LinkRefusedError` if there is none."""
        if peer.block_size == self._me.block_size:
            return self._offers
        # Scratch blocks live as long as a transfer: only where a closed session is the fence.
        offers = [
            offer
            for offer in self._offers
            if not offer.is_broken and self._transports[offer.name].capabilities.fence == "on_close"
        ]
        if not offers:
            raise LinkRefusedError(
                f"block size differs: {peer.block_size} on {peer.worker_id}, "
                f"{self._me.block_size} on {self._me.worker_id}; transport "
                f"{' or '.join(self._transports)} cannot repack"
            )
        return offers

    def _transport_to(self, peer: PeerInfo, offers: Sequence[Offer]) -> Transport:
        choice = choose(offers, self._me, peer, self._memory.kind)
        if self._links.get(peer.worker_id) != choice:
            logger.info(
                "link peer=%s transport=%s reason=%s",
                peer.worker_id,
                choice.transport,
                choice.reason.value,
            )
            self._links[peer.worker_id] = choice
        return self._transports[choice.transport]


class IncomingTransfer:
    """One transfer, as the worker holds it.

    Its destination blocks are the transfer's until `pull` has returned, or has failed and
    `wait_quiesced` has returned.
    """

    def __init__(self, pull: Pull, thread: TransferThread, ledger: _Ledger) -> None:
        """Made by `KVReceiver.transfer`."""
        self._pull = pull
        self._thread = thread
        self._ledger = ledger
        self._has_begun = False
        self._is_released = False
        self._landed: concurrent.futures.Future[Landed] = _future()
        self._quiesced: concurrent.futures.Future[None] = _future()
        self._task: asyncio.Task[Landed] | None = None  # the transfer thread's

    async def pull(self) -> Landed:
        """Fetch, verify and confirm; returns only after VALID. To be called once.

        Raises the `TransferError` tree. Cancelling the caller aborts the transfer.
        """
        if self._has_begun:
            raise RuntimeError("a transfer can be pulled once")
        if self._is_released:
            raise LeaseLostError("the transfer was released before it was pulled")
        self._thread.post(self._begin)
        self._has_begun = True
        try:
            return await asyncio.wrap_future(self._landed)
        except asyncio.CancelledError:
            self.release()
            raise

    async def wait_quiesced(self) -> None:
        """Return once no byte can land any more; at once if nothing was ever asked for.

        Raises what broke the fence, if the transport could not keep it: the blocks are then lost
        to the pool.
        """
        if self._has_begun:
            await asyncio.wrap_future(self._quiesced)

    def release(self) -> None:
        """Give up a transfer that has not landed, forget one that has ended; safe to repeat."""
        self._is_released = True
        if self._thread.is_running:
            self._thread.post(self._give_up)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._pull.run())
        self._task.add_done_callback(self._ended)
        self._ledger.begin(self._task, self._give_up)

    def _give_up(self) -> None:
        if self._task is None:
            self._pull.abandon()
        elif not self._task.done():
            # Once only, and not into the fence: it ends by itself, and must not be cut short.
            if not self._pull.is_ending:
                self._pull.is_ending = True
                self._task.cancel()
            return
        self._pull.recycle()

    def _ended(self, task: asyncio.Task[Landed]) -> None:
        self._pull.abandon()  # where it was cancelled before its first step
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._ledger.end(task, error, self._pull.blocks_landed)
        if self._pull.is_quiesced:
            self._quiesced.set_result(None)
        else:
            self._quiesced.set_exception(error or RuntimeError("ended before its fence"))
        if error is None:
            self._landed.set_result(task.result())
        elif task.cancelled():
            self._landed.set_exception(LeaseLostError("released by the receiver"))
        else:
            self._landed.set_exception(error)


class _Ledger:
    """The transfers that run, and the counts of those that have ended.

    Written by the transfer thread alone; a snapshot from another thread may be one transfer late.
    """

    def __init__(self, transports: Sequence[str]) -> None:
        self._running: dict[asyncio.Task[Landed], Callable[[], None]] = {}
        self._by_outcome: Counter[str] = Counter()
        self._blocks_published = 0
        self._bytes_published = dict.fromkeys(transports, 0)
        self._digests_checked = 0
        self._fetch = Durations(HANDOFF_BOUNDS_S)
        self._wait = Durations(HANDOFF_BOUNDS_S)

    def begin(self, task: asyncio.Task[Landed], give_up: Callable[[], None]) -> None:
        self._running[task] = give_up

    def end(
        self, task: asyncio.Task[Landed], error: BaseException | None, blocks_landed: int
    ) -> None:
        del self._running[task]
        self._digests_checked += blocks_landed
        if error is not None:
            outcome = OUTCOMES.get(type(error), "internal")
            self._by_outcome[outcome] += 1
            if outcome == "internal":
                logger.error("a transfer failed by our own fault", exc_info=error)
            return
        landed = task.result()
        self._by_outcome["landed"] += 1
        self._blocks_published += landed.num_blocks
        self._bytes_published[landed.transport] += landed.num_bytes
        self._fetch.observe(landed.fetch_s)
        self._wait.observe(landed.wait_s)

    async def end_all(self) -> None:
        for give_up in list(self._running.values()):
            give_up()
        if self._running:
            await asyncio.wait(self._running)

    def stats(self, links: Mapping[str, Choice]) -> ReceiverStats:
        return ReceiverStats(
            active=len(self._running),
            by_outcome=dict(self._by_outcome),
            blocks_published=self._blocks_published,
            bytes_published=dict(self._bytes_published),
            links=dict(links),
            digests_checked=self._digests_checked,
            fetch=self._fetch.counts(),
            wait=self._wait.counts(),
        )


def _future() -> concurrent.futures.Future[Result]:
    """A future that a waiter's cancellation leaves alone."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future
