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
    describe_difference,
)
from kv_transfer.gather import Gather
from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.landing import InPlace, Landing, Repacked
from kv_transfer.protocol import ReceiverProtocol
from kv_transfer.pull import Pull, PullOrder
from kv_transfer.receiver_stats import Ledger, ReceiverStats
from kv_transfer.scratch import ScratchArenas
from kv_transfer.selection import Choice, Offer, choose
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockMemory, Clock, LinkRefusedError, Transport

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
        `scratch` is where blocks of other shapes go first. `lease_s` is the one that prefill
        workers grant.
        """
        self._memory = memory
        self._me = me
        self._transports = {transport.name: transport for transport in transports}
        usable = [Offer.of(transport) for transport in transports]
        self._offers = (*usable[:-1], *broken, *usable[-1:])
        self._scratch = scratch or ScratchArenas()
        self._links: dict[str, Choice] = {}
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._clock = clock
        self._thread = TransferThread(f"kv-receiver-{me.worker_id}")
        self._ledger = Ledger(tuple(self._transports))

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
        """Prepare to pull `num_tokens` tokens from one owner, which has all of our heads.

        As `gather` from a single source.
        """
        return self.gather(
            [Source(peer=peer, key=key)],
            placement,
            num_tokens,
            deadline_s,
            first_blocks=first_blocks,
        )

    def gather(
        self,
        sources: Sequence[Source],
        placement: Sequence[BlockId],
        num_tokens: int,
        deadline_s: float,
        *,
        first_blocks: tuple[int, ...] = (0,),
    ) -> IncomingTransfer:
        """Prepare to pull `num_tokens` tokens, the i-th missing block into `placement[i]`.

        From each source the heads that it has of ours; what comes after the prompt is the first
        one's word. Missing are, group by group, the prompt's blocks from the index in
        `first_blocks` on: blocks of this worker's size, whatever the sources' are.
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
            self._pull_from(source, placement, num_tokens, deadline_s, first_blocks)
            for source in sources
        ]
        gather = Gather(pulls, num_tokens=num_tokens, clock=self._clock)
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
        first_blocks: tuple[int, ...],
    ) -> Pull:
        peer = source.peer
        transport = self._transport_to(peer)
        landing: Landing = InPlace(self._memory)
        if self._needs_repack(peer):
            landing, placement, first_blocks = self._repacked(
                peer, placement, num_tokens, first_blocks
            )
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
            first_blocks=first_blocks,
        )
        return Pull(order, protocol, self._clock)

    def _needs_repack(self, peer: PeerInfo) -> bool:
        return block_shape(peer) != block_shape(self._me)

    def _repacked(
        self,
        peer: PeerInfo,
        placement: Sequence[BlockId],
        num_tokens: int,
        first_blocks: tuple[int, ...],
    ) -> tuple[Landing, Sequence[BlockId], tuple[int, ...]]:
        """A landing for blocks of the peer's shape; what is expected, and covered, is those.

        The protocol's placement only numbers them: where their tokens go, the landing knows.
        """
        own = block_shape(self._me)
        landing = Repacked(
            self._memory,
            placement,
            self._scratch.of(peer.bytes_per_block),
            source=block_shape(peer),
            own=own,
            first_blocks=first_blocks,
            num_tokens=num_tokens,
        )
        their_firsts = tuple(first * own.block_size // peer.block_size for first in first_blocks)
        num_theirs = len(their_firsts) * ceil_div(num_tokens, peer.block_size)
        return landing, [BlockId(number) for number in range(num_theirs)], their_firsts

    async def close(self) -> None:
        """Abort every transfer, wait for its fence, end the thread; safe to repeat."""
        await self._thread.close(self._shut_down)

    async def _shut_down(self) -> None:
        await self._ledger.end_all()
        for transport in self._transports.values():
            await transport.close()

    def _transport_to(self, peer: PeerInfo) -> Transport:
        if self._needs_repack(peer) and self._memory.kind != "host":
            raise LinkRefusedError(
                f"{describe_difference(peer, self._me)}; {self._me.worker_id}'s pool is in "
                f"{self._memory.kind} memory, where nothing is repacked"
            )
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
