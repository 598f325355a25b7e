"""The decode worker's side of hand-offs: pulls granted blocks into places that it reserved.

`pull` returns only after the owner said VALID; any other end raises, and then the destination
blocks belong to the transfer until `wait_quiesced` has returned. Each transfer has one task on the
transfer thread; leases are renewed there, whatever the worker's loop is doing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.compatibility import (
    block_shape,
    check_compatible,
    check_heads,
)
from kv_transfer.gather import Gather
from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.landing import InPlace, Landing, Repacked
from kv_transfer.protocol import ReceiverProtocol
from kv_transfer.pull import Pull, PullOrder
from kv_transfer.receiver_stats import Ledger, ReceiverStats
from kv_transfer.repack import first_brought
from kv_transfer.scratch import ScratchArenas
from kv_transfer.selection import Choice, Offer, choose
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockMemory, Clock, Transport

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
"""So that a lease survives four renewals lost or late in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who has a sequence, or a part of its heads, and the transfer that it has opened for us."""

    peer: PeerInfo
    key: TransferKey


class KVReceiver:
    """Pulls KV into one pool; its methods are for the worker's event loop."""

    def __init__(
        self,
        *,
        memory: BlockMemory,
        me: PeerInfo,
        transports: Sequence[Transport],
        broken: Sequence[Offer] = (),
        scratch: ScratchArenas | None = None,
        lease_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare to write into `memory`, over the best of `transports` that a peer allows.

        They are named best first; `broken` would come before the last one, but do not start here.
        `scratch` is where blocks of other shapes go first: in memory of the pool's kind, the host's
        unless it is told, or it raises ValueError. `lease_s` is the one that prefill
        workers grant.
        """
        self._memory = memory
        self._me = me
        self._transports = {transport.name: transport for transport in transports}
        usable = [Offer.of(transport) for transport in transports]
        self._offers = (*usable[:-1], *broken, *usable[-1:])
        self._scratch = scratch or ScratchArenas()
        if self._scratch.workspace.kind != memory.kind:
            raise ValueError(
                f"blocks of a pool in {memory.kind} memory cannot be repacked in "
                f"{self._scratch.workspace.kind} memory"
            )
        self._links: dict[str, Choice] = {}
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._thread = TransferThread(f"kv-receiver-{me.worker_id}")
        self._ledger = Ledger(tuple(self._transports))

    @property
    def me(self) -> PeerInfo:
        """As prefill workers must know this process."""
        return self._me

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
        first_tokens: tuple[int, ...] = (0,),
    ) -> IncomingTransfer:
        """Prepare to pull `num_tokens` tokens from one owner, which has all of our heads.

        As `gather` from a single source.
        """
        return self.gather(
            [Source(peer=peer, key=key)],
            placement,
            num_tokens,
            deadline_s,
            first_tokens=first_tokens,
        )

    def gather(
        self,
        sources: Sequence[Source],
        placement: Sequence[BlockId],
        num_tokens: int,
        deadline_s: float,
        *,
        first_tokens: tuple[int, ...] = (0,),
    ) -> IncomingTransfer:
        """Prepare to pull `num_tokens` tokens, the i-th missing block into `placement[i]`.

        From each source the heads that it has of ours; what comes after the prompt is the first
        one's word. Missing are, group by group, this worker's blocks from that on which holds the
        token in `first_tokens`: before it, everything is here already or behind a sliding window.
        Nothing is asked for before `pull`. Raises `LinkRefusedError` if a worker does not fit this
        one, the sources' heads are not ours, each once, or there is no transport in common;
        ValueError for a placement that is too short, names a block twice, or is outside the pool.
        """
        peers = [source.peer for source in sources]
        for peer in peers:
            check_compatible(prefill=peer, decode=self._me)
        check_heads(peers, self._me)
        outside = [block for block in placement if not 0 <= block < self._memory.num_blocks]
        if outside:
            raise ValueError(f"blocks {outside} of {self._memory.num_blocks} in the placement")
        pulls = [
            self._pull_from(source, placement, num_tokens, deadline_s, first_tokens)
            for source in sources
        ]
        gather = Gather(
            pulls,
            num_tokens=num_tokens,
            first_tokens=self._first_brought(peers, first_tokens),
            clock=self._clock,
        )
        return IncomingTransfer(gather, self._thread, self._ledger)

    @property
    def healthy(self) -> bool:
        """Whether the transfer thread does what it is asked; see `TransferThread.is_hung`."""
        return not self._thread.is_hung

    def stats(self) -> ReceiverStats:
        """Counters as they are now."""
        return self._ledger.stats(self._links)

    def _pull_from(
        self,
        source: Source,
        placement: Sequence[BlockId],
        num_tokens: int,
        deadline_s: float,
        first_tokens: tuple[int, ...],
    ) -> Pull:
        peer = source.peer
        transport = self._transport_to(peer)
        landing: Landing = InPlace(self._memory)
        if block_shape(peer) != block_shape(self._me):
            landing = self._repacked(peer, placement, num_tokens, first_tokens)
            # Only numbers what is expected, and covered: where its tokens go, the landing knows.
            num_theirs = len(first_tokens) * ceil_div(num_tokens, peer.block_size)
            placement = [BlockId(number) for number in range(num_theirs)]
        order = PullOrder(
            transport=transport,
            landing=landing,
            peer=peer,
            key=source.key,
            me=self._me,
            renew_every_s=self._renew_every_s,
            deadline_s=deadline_s,
        )
        protocol = ReceiverProtocol(
            num_tokens=num_tokens,
            block_size=peer.block_size,
            placement=placement,
            first_blocks=tuple(token // peer.block_size for token in first_tokens),
        )
        return Pull(order, protocol, self._clock)

    def _repacked(
        self,
        peer: PeerInfo,
        placement: Sequence[BlockId],
        num_tokens: int,
        first_tokens: tuple[int, ...],
    ) -> Landing:
        return Repacked(
            self._memory,
            placement,
            self._scratch.of(peer.bytes_per_block),
            self._scratch.workspace,
            source=block_shape(peer),
            own=block_shape(self._me),
            first_tokens=first_tokens,
            num_tokens=num_tokens,
        )

    def _first_brought(
        self, peers: Sequence[PeerInfo], first_tokens: tuple[int, ...]
    ) -> tuple[int, ...]:
        """By group, from which token on all sources bring what they have of it."""
        return tuple(
            max(
                first_brought(token, source_size=peer.block_size, own_size=self._me.block_size)
                for peer in peers
            )
            for token in first_tokens
        )

    async def close(self) -> None:
        """Abort every transfer, wait for its fence, end the thread; safe to repeat."""
        await self._thread.close(self._shut_down)

    async def _shut_down(self) -> None:
        await self._ledger.end_all()
        for transport in self._transports.values():
            await transport.close()

    def _transport_to(self, peer: PeerInfo) -> Transport:
        choice = choose(self._offers, self._me, peer, self._memory.kind)
        if self._links.get(peer.worker_id) != choice:
            logger.info(
                "link peer=%s transport=%s reason=%s",
                peer.worker_id,
                choice.transport,
                choice.reason.value,
            )
            self._links[peer.worker_id] = choice
        return self._transports[choice.transport]
