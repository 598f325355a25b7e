"""Every transport brings blocks of other shapes by way of scratch blocks, on the host and a GPU.

The GPU's part is played by host memory.
"""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.transport import CorruptTransferError
from kv_transfer.transports import wire
from tests.fakes.kv_link import kv_link, one_lot, places_of
from tests.fakes.rank_link import rank_link
from tests.fakes.stream_kinds import ALL_KINDS, DEVICE_KINDS, kind_parameters

OWN_SIZE = 8
"""Tokens of decode's blocks; prefill's have 4."""


@pytest.fixture(params=kind_parameters((*ALL_KINDS, *DEVICE_KINDS)))
def kind(request):
    return request.param


@pytest.mark.parametrize("own_size", [8, 6])
async def test_blocks_of_another_size_are_repacked(kind, own_size):
    transport = kind.transport()
    async with kv_link(transport, own_size=own_size, scratch=one_lot(transport)) as link:
        landed = await link.incoming(link.offer()).pull()

        assert link.has_arrived()
        assert landed.num_blocks == 6  # of prefill's
        assert landed.moved == {kind.name: 6 * link.source.bytes_per_block}
        assert link.arena.free_lots == 1


@pytest.mark.parametrize("source_size", [4, 8])
async def test_heads_of_two_ranks_are_joined(kind, source_size):
    transport = kind.transport()
    async with rank_link(transport, transport, source_size=source_size) as link:
        await link.incoming().pull()
        assert link.has_arrived()


@pytest.mark.parametrize(
    ("source_size", "num_blocks", "begins"), [(4, 6 + 3, 12), (3, 8 + 3, 15), (8, 3 + 2, 12)]
)
async def test_of_each_group_what_its_window_leaves_is_joined(
    kind, source_size, num_blocks, begins
):
    """In decode's blocks of 4 tokens, whatever prefill's have: all from the window's on."""
    transport = kind.transport()
    async with rank_link(
        transport, transport, source_size=source_size, sliding_windows=(None, 8)
    ) as link:
        assert link.first_tokens == (0, 15)
        landed = await link.incoming().pull()
        assert link.has_arrived()
        assert landed.num_blocks == 2 * num_blocks
        assert landed.first_tokens == (0, begins)


async def test_transfers_at_once_share_what_scratch_there_is(kind):
    transport = kind.transport()
    async with kv_link(
        transport, own_size=OWN_SIZE, scratch=one_lot(transport), num_blocks=18
    ) as link:
        transfers = [link.incoming(link.offer(f"t{i}"), places_of(i)) for i in range(3)]
        await asyncio.gather(*(transfer.pull() for transfer in transfers))
        assert all(link.has_arrived(places_of(i)) for i in range(3))


async def test_a_wrong_digest_is_found_before_anything_is_copied(kind, monkeypatch):
    header = wire.block_header

    def wrong(identity, frame, block, content):
        return header(identity, frame, block, memoryview(bytes(content.nbytes)))

    transport = kind.transport()
    async with kv_link(transport, own_size=OWN_SIZE, scratch=one_lot(transport)) as link:
        monkeypatch.setattr(wire, "block_header", wrong)
        transfer = link.incoming(link.offer())
        with pytest.raises(CorruptTransferError, match="digest"):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert link.is_untouched()
        assert link.arena.free_lots == 1
