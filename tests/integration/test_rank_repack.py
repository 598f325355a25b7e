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

from kv_transfer.geometry import BlockId, KVLayout
from kv_transfer.transport import LinkRefusedError, PeerLostError
from tests.fakes.rank_pools import GUARD, NUM_BLOCKS, holds_sequence, whole_layout
from tests.fakes.rank_processes import (
    FIRST_TOKEN,
    DecodeRank,
    PrefillRank,
    decode_ranks,
    prefill_ranks,
)
from tests.fakes.stream_kinds import kind_parameters
from tests.fakes.until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN_SIZE = 8
NUM_TOKENS = 37
FIRST_TOKEN_MISSING = OWN_SIZE
"""The tokens before it are a prefix hit, and not to be written to."""
WINDOWS = (None, 16)
"""Of the two layers, where there is one: what follows sees from token 22 on."""
OWN_LAYOUT = whole_layout(OWN_SIZE)
SPLITS = [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]


def tables_of(seed: int, layout: KVLayout) -> list[list[int]]:
    """A sequence's blocks by group, anywhere in a pool."""
    needed = layout.blocks_for(NUM_TOKENS)
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), needed * len(layout.groups))
    return [blocks[start : start + needed] for start in range(0, len(blocks), needed)]


def missing_of(layout: KVLayout) -> tuple[int, ...]:
    """By group, the first token that is asked for: behind no window, and not of the prefix hit."""
    return layout.first_tokens(NUM_TOKENS, num_found=FIRST_TOKEN_MISSING)


@pytest_asyncio.fixture(params=kind_parameters(), scope="module", loop_scope="module")
async def started(request):
    """A transport, and as many processes as any test needs: they are slow to start."""
    async with prefill_ranks(request.param, 4) as ranks:
        yield request.param, ranks


async def become(ranks: list[PrefillRank], number: int, layout: KVLayout) -> list[PrefillRank]:
    """The first of the processes as the ranks of one worker that has computed the sequence."""
    chosen = ranks[:number]
    await asyncio.gather(
        *(
            rank.become(layout.for_rank(i, number), tables_of(i, layout), NUM_TOKENS)
            for i, rank in enumerate(chosen)
        )
    )
    return chosen


async def offer_and_grant(
    prefill: list[PrefillRank], decode: list[DecodeRank], layout: KVLayout
) -> None:
    """All of the sequence, in two grants, to each rank of decode that has heads of the owner's.

    `layout` is prefill's, whole.
    """
    missing = missing_of(layout)
    for rank in prefill:
        readers = [reader for reader in decode if rank in reader.owners(prefill)]
        await rank.offer(readers, missing)
        for part in (slice(0, 2), slice(2, None)):
            for reader in readers:
                await rank.grant(reader, NUM_TOKENS, part, missing)


def whole_sequence(
    reader: DecodeRank,
    tables: list[list[int]],
    layout: KVLayout = OWN_LAYOUT,
    source_size: int = OWN_SIZE,
) -> bool:
    """Whether its pool holds what was missing with its heads, and nothing else was written to."""
    return holds_sequence(
        reader.memory,
        reader.me,
        tables,
        missing_of(layout),
        NUM_TOKENS,
        source_size=source_size,
    )


@pytest.mark.parametrize("source_size", [OWN_SIZE, 12])
@pytest.mark.parametrize(("num_prefill", "num_decode"), SPLITS)
async def test_every_decode_rank_gets_its_heads_of_every_token(
    started, num_prefill, num_decode, source_size
):
    kind, ranks = started
    source = whole_layout(source_size)
    prefill = await become(ranks, num_prefill, source)
    async with decode_ranks(kind, OWN_LAYOUT, num_decode) as decode:
        await offer_and_grant(prefill, decode, source)
        tables = [tables_of(100 + i, OWN_LAYOUT) for i in range(num_decode)]
        transfers = [
            reader.incoming(
                reader.owners(prefill), its, NUM_TOKENS, first_tokens=(FIRST_TOKEN_MISSING,)
            )
            for reader, its in zip(decode, tables, strict=True)
        ]

        landed = await asyncio.gather(*(transfer.pull() for transfer in transfers))

        for reader, its, result in zip(decode, tables, landed, strict=True):
            assert whole_sequence(reader, its)
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


@pytest.mark.parametrize(
    ("source_size", "num_blocks"), [(OWN_SIZE, 4 + 3), (12, 4 + 3), (5, 7 + 4)]
)
@pytest.mark.parametrize(("num_prefill", "num_decode"), SPLITS)
async def test_ranks_hand_over_what_windows_leave(
    started, num_prefill, num_decode, source_size, num_blocks
):
    """Of each group the blocks that the first output token sees: those of each end's own size."""
    kind, ranks = started
    layout, source = whole_layout(OWN_SIZE, WINDOWS), whole_layout(source_size, WINDOWS)
    missing = missing_of(layout)
    assert missing == (FIRST_TOKEN_MISSING, 22)
    prefill = await become(ranks, num_prefill, source)
    async with decode_ranks(kind, layout, num_decode) as decode:
        await offer_and_grant(prefill, decode, source)
        tables = [tables_of(100 + i, layout) for i in range(num_decode)]

        landed = await asyncio.gather(
            *(
                reader.incoming(
                    reader.owners(prefill), its, NUM_TOKENS, first_tokens=missing
                ).pull()
                for reader, its in zip(decode, tables, strict=True)
            )
        )

        for reader, its, result in zip(decode, tables, landed, strict=True):
            assert whole_sequence(reader, its, layout, source_size)
            assert result.num_blocks == num_blocks * len(reader.owners(prefill))


async def test_blocks_stay_pinned_until_the_last_rank_has_confirmed(started):
    """What one rank says of its lease frees nothing that another one still reads."""
    kind, ranks = started
    prefill = await become(ranks, 1, OWN_LAYOUT)
    async with decode_ranks(kind, OWN_LAYOUT, 2) as decode:
        await offer_and_grant(prefill, decode, OWN_LAYOUT)
        tables = tables_of(100, OWN_LAYOUT)
        early, late = (
            reader.incoming(prefill, tables, NUM_TOKENS, first_tokens=(FIRST_TOKEN_MISSING,))
            for reader in decode
        )
        await early.pull()
        assert (await prefill[0].owner.ask("stats"))["active"] == 1
        assert prefill[0].owner.ended == {}

        await late.pull()

        await until(lambda: len(prefill[0].owner.ended) == 2)
        assert all(whole_sequence(reader, tables) for reader in decode)


async def test_sources_that_are_not_all_heads_are_refused_before_anything_is_asked(started):
    kind, ranks = started
    prefill = await become(ranks, 2, OWN_LAYOUT)
    async with decode_ranks(kind, OWN_LAYOUT, 1) as (reader,):
        for sources in (prefill[:1], prefill[1:], [*prefill, prefill[0]]):
            with pytest.raises(LinkRefusedError, match=r"KV heads do not add up: . to . on"):
                reader.incoming(sources, tables_of(1, OWN_LAYOUT), NUM_TOKENS)
        assert reader.receiver.stats().by_outcome == {}


@pytest.mark.parametrize("kind", kind_parameters())
async def test_one_owner_killed_in_the_middle_ends_all_and_nothing_counts(kind):
    async with (
        prefill_ranks(kind, 2) as ranks,
        decode_ranks(kind, OWN_LAYOUT, 1) as (reader,),
    ):
        prefill = await become(ranks, 2, OWN_LAYOUT)
        for rank in prefill:
            await rank.offer([reader])
            await rank.grant(reader, NUM_TOKENS, slice(0, 2))
        tables = tables_of(100, OWN_LAYOUT)
        transfer = reader.incoming(prefill, tables, NUM_TOKENS)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: has_landed(reader, tables[0][1]))

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
