"""The ranks of a prefill worker and one of a decode worker in one process, over any transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import FirstToken, GrantedBlock, PeerInfo, ReleaseReason, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver, Source
from kv_transfer.scratch import ScratchArenas
from kv_transfer.sender import KVSender
from kv_transfer.transport import Transport
from tests.fakes.block_memory import ByteMemory
from tests.fakes.kv_link import seen_by, workspace_for
from tests.fakes.kv_processes import key_of
from tests.fakes.rank_pools import (
    Tables,
    blocks_of,
    guarded,
    holds_sequence,
    places_of,
    rank_info,
    whole_layout,
    write_sequence,
)
from tests.fakes.until import turned

NUM_TOKENS = 22
TABLES = [[3, 1, 4, 15, 9, 2, 0, 5], [20, 11, 12, 13, 8, 17, 6, 7]]
"""By group, on every rank of prefill: as many blocks as are needed where they have 3 tokens."""
PLACES = [[5, 0, 7, 9, 1, 2], [3, 4, 6, 8, 10, 14]]


@dataclass(kw_only=True)
class OwnerRank:
    """One of prefill, with its pool and what its sender reported."""

    info: PeerInfo
    memory: ByteMemory
    sender: KVSender
    ends: asyncio.Queue[tuple[TransferKey, ReleaseReason]] = field(default_factory=asyncio.Queue)

    async def next_end(self) -> ReleaseReason:
        """Why the next transfer ended."""
        async with asyncio.timeout(10):
            return (await self.ends.get())[1]


@dataclass(frozen=True, kw_only=True)
class RankLink:
    """Owners, and who pulls from all of them."""

    owners: Sequence[OwnerRank]
    me: PeerInfo
    memory: ByteMemory
    receiver: KVReceiver
    first_tokens: tuple[int, ...]
    """By group: those before are behind the window."""

    @property
    def places(self) -> Tables:
        """Of decode's, by group."""
        return PLACES[: len(self.first_tokens)]

    def key(self, owner: OwnerRank) -> TransferKey:
        """Of the only transfer from there."""
        return key_of(owner.info, self.me, f"of {owner.info.worker_id}")

    def grant(self, owner: OwnerRank) -> None:
        """All of the sequence, in two grants; rank r says the token 40 + r.

        A reader that dies of the first one has ended the transfer before the second.
        """
        key = self.key(owner)
        blocks = self.blocks(owner)
        assert owner.sender.grant(key, blocks[:2], None)
        owner.sender.grant(key, blocks[2:], FirstToken(token_id=40 + owner.info.tp_rank))

    def blocks(self, owner: OwnerRank) -> tuple[GrantedBlock, ...]:
        """All that are granted."""
        return blocks_of(
            owner.info, TABLES[: len(self.first_tokens)], self.first_tokens, NUM_TOKENS
        )

    def incoming(self, granting: Sequence[OwnerRank] | None = None) -> IncomingTransfer:
        """All of it from all owners; those that are not granting have only opened a transfer."""
        for owner in self.owners:
            first_blocks = tuple(token // owner.info.block_size for token in self.first_tokens)
            owner.sender.open(self.key(owner), self.me, first_blocks=first_blocks)
        for owner in self.owners if granting is None else granting:
            self.grant(owner)
        sources = [Source(peer=owner.info, key=self.key(owner)) for owner in self.owners]
        places = places_of(self.places, self.first_tokens, self.me.block_size)
        return self.receiver.gather(
            sources, places, NUM_TOKENS, 20.0, first_tokens=self.first_tokens
        )

    async def turned(self) -> None:
        """See `until.turned`: of all ends."""
        threads = [owner.sender._thread for owner in self.owners]
        await turned(self.receiver._thread, *threads)

    def has_arrived(self) -> bool:
        """Whether the pool holds the sequence, with all heads, and nothing else."""
        return holds_sequence(
            self.memory,
            self.me,
            self.places,
            self.first_tokens,
            NUM_TOKENS,
            source_size=self.owners[0].info.block_size,
        )


@asynccontextmanager
async def rank_link(
    *transports: Transport,
    source_size: int = 4,
    sliding_windows: tuple[int | None, ...] = (),
    scratch: ScratchArenas | None = None,
) -> AsyncIterator[RankLink]:
    """A whole decode worker and as many prefill ranks as transports, each over its own."""
    layout = whole_layout(4, sliding_windows)
    me = rank_info(layout, "decode-0", "d-1")
    memory = guarded(me)
    receiver = KVReceiver(
        memory=seen_by(transports[0], memory),
        me=me,
        transports=list({t.name: t for t in transports}.values()),
        scratch=scratch or ScratchArenas(workspace_for(transports[0])),
    )
    sources = replace(layout, block_size=source_size)
    async with AsyncExitStack() as stack:
        owners = [
            await stack.enter_async_context(_owner(sources.for_rank(i, len(transports)), transport))
            for i, transport in enumerate(transports)
        ]
        await receiver.start()
        stack.push_async_callback(receiver.close)
        yield RankLink(
            owners=owners,
            me=me,
            memory=memory,
            receiver=receiver,
            first_tokens=layout.first_tokens(NUM_TOKENS),
        )


@asynccontextmanager
async def _owner(layout: KVLayout, transport: Transport) -> AsyncIterator[OwnerRank]:
    info = rank_info(layout, f"prefill-{layout.tp_rank}", f"p-{layout.tp_rank}")
    if transport.capabilities.gpus == "two":
        info = replace(info, gpu="GPU-1")
    memory = guarded(info, shared=True)
    first_tokens = layout.first_tokens(NUM_TOKENS)
    write_sequence(memory, info, TABLES[: len(first_tokens)], first_tokens, NUM_TOKENS)
    ends: asyncio.Queue[tuple[TransferKey, ReleaseReason]] = asyncio.Queue()
    sender = KVSender(
        memory=seen_by(transport, memory),
        me=info,
        generation_of=memory.generation_of,
        transports=[transport],
        on_end=lambda key, reason: ends.put_nowait((key, reason)),
        sweep_s=0.005,
    )
    try:
        yield OwnerRank(info=await sender.start(), memory=memory, sender=sender, ends=ends)
    finally:
        await sender.close()
        assert memory.region is not None
        memory.region.close()
