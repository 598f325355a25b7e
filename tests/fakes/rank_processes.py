"""Prefill ranks in processes of their own, and decode ranks in the test's, that pull from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

from kv_transfer.compatibility import check_compatible
from kv_transfer.geometry import KVLayout
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver, Source
from kv_transfer.transport import LinkRefusedError
from tests.fakes.block_memory import ByteMemory
from tests.fakes.kv_processes import PATIENT, OwnerProcess, key_of, owner_process
from tests.fakes.rank_pools import Tables, blocks_of, guarded, places_of, rank_info
from tests.fakes.stream_kinds import StreamKind

FIRST_TOKEN = 7
"""That rank 0 says; rank r says r more."""


class PrefillRank:
    """A process that can be a rank of any prefill worker, one after the other."""

    def __init__(self, owner: OwnerProcess, number: int) -> None:
        self.owner = owner
        self.number = number
        self.tables: Tables = ()

    @property
    def info(self) -> PeerInfo:
        """As which it is known now."""
        return self.owner.info

    async def become(self, layout: KVLayout, tables: Tables, num_tokens: int) -> None:
        """Hold a sequence, in blocks of this layout, as another worker than before.

        What is behind a window it has given up.
        """
        name = f"prefill-{layout.tp_rank}-of-{layout.tp_size}-{layout.block_size}"
        me = rank_info(layout, name, name)
        answer = await self.owner.ask(
            "become",
            me=asdict(me),
            tables=tables,
            first_tokens=layout.first_tokens(num_tokens),
            num_tokens=num_tokens,
        )
        peer = answer["peer"]
        peer["endpoints"] = tuple(tuple(endpoint) for endpoint in peer["endpoints"])
        self.owner.info = PeerInfo(**peer)
        self.owner.ended.clear()
        self.tables = tables

    async def offer(
        self, readers: Sequence[DecodeRank], first_tokens: Sequence[int] = (0,)
    ) -> None:
        """Open a transfer to each of these ranks, and grant nothing yet."""
        pairs = [(asdict(reader.key(self)), asdict(reader.me)) for reader in readers]
        first_blocks = [token // self.info.block_size for token in first_tokens]
        await self.owner.ask("offer_together", readers=pairs, first_blocks=first_blocks)

    async def grant(
        self,
        reader: DecodeRank,
        num_tokens: int,
        part: slice,
        first_tokens: Sequence[int] = (0,),
    ) -> None:
        """Grant some of the blocks; those up to the end are the last ones."""
        blocks = blocks_of(self.info, self.tables, first_tokens, num_tokens)[part]
        await self.owner.ask(
            "grant_part",
            key=asdict(reader.key(self)),
            blocks=[asdict(block) for block in blocks],
            token_id=FIRST_TOKEN + self.number if part.stop is None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRank:
    """A rank of a decode worker, with its pool."""

    me: PeerInfo
    memory: ByteMemory
    receiver: KVReceiver

    def key(self, rank: PrefillRank) -> TransferKey:
        """Of its only transfer from there."""
        return key_of(rank.info, self.me, f"{rank.info.worker_id} to {self.me.worker_id}")

    def owners(self, ranks: Sequence[PrefillRank]) -> list[PrefillRank]:
        """Those that have heads of its own."""
        return [rank for rank in ranks if self._may_link(rank)]

    def incoming(
        self,
        ranks: Sequence[PrefillRank],
        tables: Tables,
        num_tokens: int,
        *,
        first_tokens: tuple[int, ...] = (0,),
    ) -> IncomingTransfer:
        """A transfer of everything that is missing from the tokens `first_tokens` on."""
        return self.receiver.gather(
            [Source(peer=rank.info, key=self.key(rank)) for rank in ranks],
            places_of(tables, first_tokens, self.me.block_size),
            num_tokens,
            30.0,
            first_tokens=first_tokens,
        )

    def _may_link(self, rank: PrefillRank) -> bool:
        try:
            check_compatible(rank.info, self.me)
        except LinkRefusedError:
            return False
        return True


@asynccontextmanager
async def prefill_ranks(kind: StreamKind, number: int) -> AsyncIterator[list[PrefillRank]]:
    """Processes that are started at once."""
    async with AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(owner_process(kind, 64, name=f"rank-{i}"))
            for i in range(number)
        ]
        owners = await asyncio.gather(*starts)
        yield [PrefillRank(owner, i) for i, owner in enumerate(owners)]


@asynccontextmanager
async def decode_ranks(
    kind: StreamKind, layout: KVLayout, number: int
) -> AsyncIterator[list[DecodeRank]]:
    """The ranks over which the layout's heads are split, each with a pool full of guard bytes."""
    ranks = []
    for i in range(number):
        me = rank_info(layout.for_rank(i, number), f"decode-{i}", f"decode-{i}-of-{number}")
        memory = guarded(me)
        receiver = KVReceiver(memory=memory, me=me, transports=[kind.transport(timings=PATIENT)])
        ranks.append(DecodeRank(me=me, memory=memory, receiver=receiver))
    async with AsyncExitStack() as stack:
        for rank in ranks:
            await rank.receiver.start()
            stack.push_async_callback(rank.receiver.close)
        yield ranks
