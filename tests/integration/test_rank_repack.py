"""A sequence goes from the ranks of one worker to those of another, with other shares of heads.

Prefill ranks are processes. Nothing here computes: what a tensor-parallel model runner would need
of a hand-off is done for it, over pools in which every byte says whose it is.
"""

from __future__ import annotations

import asyncio
import random
import signal

import pytest
import pytest_asyncio

from kv_transfer.geometry import BlockId
from kv_transfer.transport import LinkRefusedError, PeerLostError
from tests.fakes.rank_pools import GUARD, NUM_BLOCKS, holds_sequence, whole_layout
from tests.fakes.rank_processes import (
    FIRST_TOKEN,
    DecodeRank,
    PrefillRank,
    decode_ranks,
    prefill_ranks,
)
from tests.fakes.stream_kinds import SHM, TCP
from tests.fakes.until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN_SIZE = 8
NUM_TOKENS = 37
FIRST_BLOCK = 1
"""Of decode's: the tokens before it are a prefix hit, and not to be written to."""
FIRST_TOKEN_MISSING = FIRST_BLOCK * OWN_SIZE
SPLITS = [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]


def table_of(seed: int, block_size: int) -> list[int]:
    """A sequence's blocks, anywhere in a pool."""
    return random.Random(seed).sample(range(NUM_BLOCKS), -(-NUM_TOKENS // block_size))


@pytest_asyncio.fixture(
    params=[TCP, SHM], ids=lambda kind: kind.name, scope="module", loop_scope="module"
)
async def started(request):
    """A transport, and as many processes as any test needs: they are slow to start."""
    async with prefill_ranks(request.param, 4) as ranks:
        yield request.param, ranks


async def become(ranks: list[PrefillRank], number: int, block_size: int) -> list[PrefillRank]:
    """The first of the processes as the ranks of one worker that has computed the sequence."""
    layout = whole_layout(block_size)
    chosen = ranks[:number]
    await asyncio.gather(
        *(
            rank.become(layout.for_rank(i, number), table_of(i, block_size), NUM_TOKENS)
            for i, rank in enumerate(chosen)
        )
    )
    return chosen


async def offer_and_grant(prefill: list[PrefillRank], decode: list[DecodeRank]) -> None:
    """All of the sequence, in two grants, to each rank of decode that has heads of the owner's."""
    for rank in prefill:
        readers = [reader for reader in decode if rank in reader.owners(prefill)]
        await rank.offer(readers, FIRST_TOKEN_MISSING)
        for part in (slice(0, 2), slice(2, None)):
            for reader in readers:
                await rank.grant(reader, NUM_TOKENS, part, FIRST_TOKEN_MISSING)


def whole_sequence(reader: DecodeRank, table: list[int]) -> bool:
    """Whether its pool holds what was missing with its heads, and nothing else was written to."""
    tokens = range(FIRST_TOKEN_MISSING, NUM_TOKENS)
    return holds_sequence(reader.memory, reader.me, table, tokens)


@pytest.mark.parametrize("source_size", [OWN_SIZE, 12])
@pytest.mark.parametrize(("num_prefill", "num_decode"), SPLITS)
async def test_every_decode_rank_gets_its_heads_of_every_token(
    started, num_prefill, num_decode, source_size
):
    kind, ranks = started
    prefill = await become(ranks, num_prefill, source_size)
    async with decode_ranks(kind, whole_layout(OWN_SIZE), num_decode) as decode:
        await offer_and_grant(prefill, decode)
        tables = [table_of(100 + i, OWN_SIZE) for i in range(num_decode)]
        transfers = [
            reader.incoming(reader.owners(prefill), table, NUM_TOKENS, first_block=FIRST_BLOCK)
            for reader, table in zip(decode, tables, strict=True)
        ]

        landed = await asyncio.gather(*(transfer.pull() for transfer in transfers))

        for reader, table, result in zip(decode, tables, landed, strict=True):
            assert whole_sequence(reader, table)
            owners = reader.owners(prefill)
            assert result.first.token_id == FIRST_TOKEN + owners[0].number
            blocks = -(-NUM_TOKENS // source_size) - FIRST_TOKEN_MISSING // source_size
            assert result.num_blocks == blocks * len(owners)
            # Whole blocks are moved, also where only some of their heads are wanted.
            assert result.moved == {
                kind.name: blocks * sum(owner.info.bytes_per_block for owner in owners)
            }
            assert reader.receiver.stats().by_outcome == {"landed": 1}
        for rank in prefill:
            readers = [reader for reader in decode if rank in reader.owners(prefill)]
            expected = {reader.key(rank).transfer_id: ["confirmed"] for reader in readers}
            await until(lambda rank=rank, expected=expected: rank.owner.ended == expected)


async def test_blocks_stay_pinned_until_the_last_rank_has_confirmed(started):
    """What one rank says of its lease frees nothing that another one still reads."""
    kind, ranks = started
    prefill = await become(ranks, 1, OWN_SIZE)
    async with decode_ranks(kind, whole_layout(OWN_SIZE), 2) as decode:
        await offer_and_grant(prefill, decode)
        table = table_of(100, OWN_SIZE)
        early, late = (
            reader.incoming(prefill, table, NUM_TOKENS, first_block=FIRST_BLOCK)
            for reader in decode
        )
        await early.pull()
        assert (await prefill[0].owner.ask("stats"))["active"] == 1
        assert prefill[0].owner.ended == {}

        await late.pull()

        await until(lambda: len(prefill[0].owner.ended) == 2)
        assert all(whole_sequence(reader, table) for reader in decode)


async def test_sources_that_are_not_all_heads_are_refused_before_anything_is_asked(started):
    kind, ranks = started
    prefill = await become(ranks, 2, OWN_SIZE)
    async with decode_ranks(kind, whole_layout(OWN_SIZE), 1) as (reader,):
        for sources in (prefill[:1], prefill[1:], [*prefill, prefill[0]]):
            with pytest.raises(LinkRefusedError, match=r"KV heads do not add up: . to . on"):
                reader.incoming(sources, table_of(1, OWN_SIZE), NUM_TOKENS)
        assert reader.receiver.stats().by_outcome == {}


@pytest.mark.parametrize("kind", [TCP, SHM], ids=lambda kind: kind.name)
async def test_one_owner_killed_in_the_middle_ends_all_and_nothing_counts(kind):
    async with (
        prefill_ranks(kind, 2) as ranks,
        decode_ranks(kind, whole_layout(OWN_SIZE), 1) as (reader,),
    ):
        prefill = await become(ranks, 2, OWN_SIZE)
        for rank in prefill:
            await rank.offer([reader])
            await rank.grant(reader, NUM_TOKENS, slice(0, 2))
        table = table_of(100, OWN_SIZE)
        transfer = reader.incoming(prefill, table, NUM_TOKENS)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: has_landed(reader, table[1]))

        prefill[1].owner.signal(signal.SIGKILL)

        with pytest.raises(PeerLostError):
            await pulling
        await transfer.wait_quiesced()
        key = reader.key(prefill[0])
        await until(lambda: prefill[0].owner.ended == {key.transfer_id: ["released"]})
        assert (await prefill[0].owner.ask("stats"))["active"] == 0
        stats = reader.receiver.stats()
        assert (stats.active, stats.blocks_published) == (0, 0)
        assert stats.by_outcome == {"peer_lost": 1}


def has_landed(reader: DecodeRank, block_id: int) -> bool:
    """Whether all of a block was written, by both of its owners."""
    return GUARD not in bytes(reader.memory.block(BlockId(block_id)))
