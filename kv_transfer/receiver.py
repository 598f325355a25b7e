"""The decode worker's side of hand-offs: pulls granted blocks into places that it reserved.

`pull` returns only after the owner said VALID; any other end raises, and then the destination
blocks belong to the transfer until `wait_quiesced` has returned. Each transfer has one task on the
transfer thread; leases are renewed there, whatever the worker's loop is doing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kv_transfer.compatibility import block_shape, check_compatible
from kv_transfer.geometry import BlockId, ceil_div
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.landing import InPlace, Landing, Repacked
from kv_transfer.protocol import ReceiverProtocol
from kv_transfer.pull import Pull, PullOrder
from kv_transfer.receiver_stats import Ledger, ReceiverStats
from kv_transfer.selection import Choice, Offer, choose
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockMemory, Clock, LinkRefusedError, Transport

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
"""So that a lease survives four renewals lost or late in a row."""


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
