"""One sequence pulled from two owners: it lands from both, or fails when both are quiet."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.gather import Gather
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import InvalidTransferError, LeaseLostError, PeerLostError
from tests.fakes.clock import FakeClock
from tests.fakes.rank_link import rank_link
from tests.fakes.transport import Fault, FaultKind, FaultyTransport

PIECES = 2 + 6 + 1  # grants, blocks, verdict
LAST_BLOCK = 7


class Other(FaultyTransport):
    """The second owner's, so that a fault is in one of the two."""

    name = "other"


class Leaky(Other):
    """Its fence does not come to pass."""

    async def wait_fence(self):
        raise OSError("cannot tell")


async def test_both_owners_bring_their_heads_and_are_confirmed():
    async with rank_link(FaultyTransport(), Other()) as link:
        landed = await link.incoming().pull()

        assert link.has_arrived()
        assert landed.first.token_id == 40  # the first source's
        assert (landed.num_tokens, landed.num_blocks) == (22, 12)
        size = link.owners[0].info.bytes_per_block
        assert landed.moved == {"faulty": 6 * size, "other": 6 * size}
        assert landed.num_bytes == 12 * size
        assert 0 <= landed.wait_s <= landed.fetch_s
        for owner in link.owners:
            assert await owner.next_end() is ReleaseReason.CONFIRMED
        stats = link.receiver.stats()
        assert stats.by_outcome == {"landed": 1}
        assert stats.bytes_published == {"faulty": 6 * size, "other": 6 * size}
        assert (stats.blocks_published, stats.digests_checked) == (12, 12)


async def test_nothing_is_published_before_the_slower_owner_has_confirmed():
    slow = Other(Fault(FaultKind.DELAY, PIECES - 1))
    async with rank_link(FaultyTransport(), slow) as link:
        pulling = asyncio.create_task(link.incoming().pull())
        assert await link.owners[0].next_end() is ReleaseReason.CONFIRMED
        await slow.wait_reached()
        await link.turned()
        assert not pulling.done()
        assert link.receiver.stats().blocks_published == 0

        slow.resume()

        await pulling
        assert link.has_arrived()


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("fails", [0, 1])
async def test_the_blocks_of_a_failed_owner_wait_for_its_sibling_to_be_quiet(fails, piece):
    """Free on first sibling error: the other still writes to the very same blocks."""
    dying, writing = Fault(FaultKind.DIE, piece), Fault(FaultKind.HANG, LAST_BLOCK)
    faults = [writing, writing]
    faults[fails] = dying
    transports = (FaultyTransport(faults[0]), Other(faults[1]))
    sibling = transports[1 - fails]
    sibling.hold_fence()
    async with rank_link(*transports) as link:
        transfer = link.incoming(granting=[link.owners[1 - fails]])
        pulling = asyncio.create_task(transfer.pull())
        await sibling.wait_reached()
        link.grant(link.owners[fails])
        await sibling.wait_closing()
        transfer.release()
        waiting = asyncio.create_task(transfer.wait_quiesced())
        await link.turned()
        assert not pulling.done()
        assert not waiting.done()

        sibling.pass_fence()

        with pytest.raises(PeerLostError):
            await pulling
        await waiting
        assert link.receiver.stats().by_outcome == {"peer_lost": 1}
        assert link.receiver.stats().blocks_published == 0
        assert await link.owners[1 - fails].next_end() is ReleaseReason.RELEASED


async def test_an_owner_that_had_confirmed_counts_for_nothing_without_the_other():
    slow = Other(Fault(FaultKind.DELAY, LAST_BLOCK))
    async with rank_link(FaultyTransport(), slow) as link:
        transfer = link.incoming()
        pulling = asyncio.create_task(transfer.pull())
        assert await link.owners[0].next_end() is ReleaseReason.CONFIRMED
        await slow.wait_reached()
        link.owners[1].memory.generations[3] += 1  # freed under the reader

        slow.resume()

        with pytest.raises(InvalidTransferError):
            await pulling
        await transfer.wait_quiesced()
        assert link.receiver.stats().by_outcome == {"invalid": 1}
        assert link.receiver.stats().blocks_published == 0


@pytest.mark.parametrize("dying", [True, False], ids=["a sibling dies", "the caller leaves"])
async def test_a_fence_that_one_source_breaks_is_told_before_all_else(dying):
    """The blocks are lost to the pool, however quiet the other one is."""
    first = FaultyTransport(*([Fault(FaultKind.DIE, 4)] if dying else []))
    second = Leaky(Fault(FaultKind.HANG, 4))
    async with rank_link(first, second) as link:
        transfer = link.incoming(granting=[link.owners[1]])
        pulling = asyncio.create_task(transfer.pull())
        await second.wait_reached()
        link.grant(link.owners[0])
        if not dying:
            transfer.release()
        with pytest.raises(OSError, match="cannot tell"):
            await pulling
        with pytest.raises(OSError, match="cannot tell"):
            await transfer.wait_quiesced()
        assert link.receiver.stats().by_outcome == {"fence_broken": 1}


async def test_a_fence_that_breaks_after_the_confirm_is_told_too():
    async with rank_link(FaultyTransport(), Leaky()) as link:
        transfer = link.incoming()
        with pytest.raises(OSError, match="cannot tell"):
            await transfer.pull()
        with pytest.raises(OSError, match="cannot tell"):
            await transfer.wait_quiesced()
        assert link.receiver.stats().blocks_published == 0


@pytest.mark.parametrize("piece", range(PIECES))
async def test_a_caller_that_leaves_ends_both_owners_transfers(piece):
    hung = Other(Fault(FaultKind.HANG, piece))
    async with rank_link(FaultyTransport(), hung) as link:
        transfer = link.incoming()
        pulling = asyncio.create_task(transfer.pull())
        await hung.wait_reached()
        assert await link.owners[0].next_end() is ReleaseReason.CONFIRMED
        transfer.release()
        transfer.release()
        with pytest.raises(LeaseLostError, match="released"):
            await pulling
        await transfer.wait_quiesced()
        transfer.release()
        await link.owners[1].next_end()
        assert link.owners[1].sender.stats().active_leases == 0
        assert link.receiver.stats().by_outcome == {"cancelled": 1}


async def test_closing_the_receiver_waits_for_the_fence_of_every_source():
    transports = FaultyTransport(Fault(FaultKind.HANG, 3)), Other(Fault(FaultKind.HANG, 5))
    async with rank_link(*transports) as link:
        for transport in transports:
            transport.hold_fence()
        pulling = asyncio.create_task(link.incoming().pull())
        for transport in transports:
            await transport.wait_reached()
        closing = asyncio.create_task(link.receiver.close())
        for transport in transports:
            await transport.wait_closing()
            assert not closing.done()
            transport.pass_fence()
        await closing
        with pytest.raises(LeaseLostError):
            await pulling


def test_there_is_no_gather_of_nothing():
    with pytest.raises(ValueError, match="needs a source"):
        Gather([], num_tokens=1, first_tokens=(0,), clock=FakeClock())
