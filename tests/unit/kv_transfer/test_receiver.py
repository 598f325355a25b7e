import asyncio
import dataclasses
import threading

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import ReleaseReason
from kv_transfer.receiver import KVReceiver
from kv_transfer.scratch import ScratchArenas
from kv_transfer.selection import LinkReason, Offer
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
    TransferDeadlineError,
)
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, NUM_TOKENS, PLACES, POISON, kv_link
from tests.fakes.rank_link import rank_link
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import until

PIECES = 3 + 6 + 1  # grants, blocks, verdict


def outcomes(link):
    return dict(link.receiver.stats().by_outcome)


async def test_a_handoff_lands_every_byte_and_reports_what_it_moved():
    async with kv_link(FaultyTransport()) as link:
        landed = await link.incoming(link.offer()).pull()
        assert link.has_arrived()
        assert landed.first == FIRST
        assert (landed.num_tokens, landed.num_blocks) == (NUM_TOKENS, 6)
        assert landed.num_bytes == 6 * link.source.bytes_per_block
        assert 0 <= landed.wait_s <= landed.fetch_s
        assert await link.next_end() is ReleaseReason.CONFIRMED
        stats = link.receiver.stats()
        assert stats.by_outcome == {"landed": 1}
        assert (stats.active, stats.blocks_published, stats.digests_checked) == (0, 6, 6)
        assert stats.bytes_published == {"faulty": landed.num_bytes}
        assert (stats.bytes_discarded, stats.seconds_lost) == ({"faulty": 0}, {})
        assert (stats.fetch.total_s, stats.wait.total_s) == (landed.fetch_s, landed.wait_s)


async def test_blocks_are_fetched_while_more_is_being_computed():
    transport = FaultyTransport(Fault(FaultKind.DELAY, 2))  # grant, block, block
    async with kv_link(transport) as link:
        key = link.open()
        assert link.sender.grant(key, link.blocks()[:2], None)
        pulling = asyncio.create_task(link.incoming(key).pull())
        await transport.wait_reached()  # the second block is there before the second grant is made
        assert link.destination.block(PLACES[0]) == link.source.block(BlockId(3))
        transport.resume()
        assert link.sender.grant(key, link.blocks()[2:], FIRST)
        await pulling


async def test_blocks_beyond_the_prompt_are_left_alone():
    places = [*PLACES, BlockId(12), BlockId(13)]
    async with kv_link(FaultyTransport()) as link:
        await link.incoming(link.offer(), places).pull()
        for spare in places[6:]:
            assert set(link.destination.block(spare)) == {POISON}


@pytest.mark.parametrize("piece", range(PIECES))
async def test_a_peer_that_dies_at_any_piece_is_lost_and_nothing_is_published(piece):
    async with kv_link(FaultyTransport(Fault(FaultKind.DIE, piece))) as link:
        transfer = link.incoming(link.offer())
        with pytest.raises(PeerLostError):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert outcomes(link) == {"peer_lost": 1}
        # Where the verdict was lost on its way, the owner has given the blocks up already.
        lost_verdict = piece == PIECES - 1
        expected = ReleaseReason.CONFIRMED if lost_verdict else ReleaseReason.PEER_LOST
        assert await link.next_end() is expected


@pytest.mark.parametrize("piece", range(PIECES))
async def test_a_peer_that_hangs_at_any_piece_ends_at_the_deadline(piece):
    async with kv_link(FaultyTransport(Fault(FaultKind.HANG, piece))) as link:
        transfer = link.incoming(link.offer(), deadline_s=0.05)
        with pytest.raises(TransferDeadlineError, match=r"0\.05"):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert outcomes(link) == {"deadline": 1}


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.REORDER])
async def test_lost_repeated_and_swapped_pieces_never_give_a_wrong_block(kind, piece):
    """Either the hand-off lands with every byte in place, or it fails and publishes nothing."""
    async with kv_link(FaultyTransport(Fault(kind, piece))) as link:
        transfer = link.incoming(link.offer(), deadline_s=0.3)
        try:
            await transfer.pull()
        except (CorruptTransferError, TransferDeadlineError):
            await transfer.wait_quiesced()
            assert link.receiver.stats().blocks_published == 0
        else:  # blocks of one grant may come in any order
            assert kind is not FaultKind.DROP
            assert link.has_arrived()


@pytest.mark.parametrize("piece", range(PIECES))
async def test_a_piece_that_comes_late_changes_nothing(piece):
    transport = FaultyTransport(Fault(FaultKind.DELAY, piece))
    async with kv_link(transport) as link:
        pulling = asyncio.create_task(link.incoming(link.offer()).pull())
        await transport.wait_reached()
        assert not pulling.done()
        transport.resume()
        await pulling
        assert link.has_arrived()
        assert await link.next_end() is ReleaseReason.CONFIRMED


async def test_a_confirm_that_is_lost_ends_at_the_deadline_and_the_owner_is_told():
    transport = FaultyTransport()
    transport.lost.add("confirm")
    async with kv_link(transport) as link:
        with pytest.raises(TransferDeadlineError, match="while landed"):
            await link.incoming(link.offer(), deadline_s=0.3).pull()
        assert await link.next_end() is ReleaseReason.RELEASED


async def test_a_release_that_is_lost_is_made_up_for_by_the_end_of_the_session():
    transport = FaultyTransport(Fault(FaultKind.CORRUPT, 2))
    transport.lost.add("release")
    async with kv_link(transport) as link:
        with pytest.raises(CorruptTransferError):
            await link.incoming(link.offer()).pull()
        assert await link.next_end() is ReleaseReason.PEER_LOST


async def test_a_receiver_whose_renewals_are_lost_loses_its_lease():
    clock, transport = FakeClock(), FaultyTransport()
    transport.lost.add("renew")
    async with kv_link(transport, clock=clock, lease_s=0.05) as link:
        pulling = asyncio.create_task(link.incoming(link.open()).pull())
        await until(lambda: link.receiver.stats().active == 1)
        clock.advance(0.05)
        with pytest.raises(LeaseLostError, match="expired"):
            await pulling
        assert await link.next_end() is ReleaseReason.EXPIRED


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("kind", [FaultKind.TRUNCATE, FaultKind.CORRUPT])
async def test_damage_that_the_transport_finds_fails_the_transfer(kind, block):
    async with kv_link(FaultyTransport(Fault(kind, block))) as link:
        transfer = link.incoming(link.offer())
        with pytest.raises(CorruptTransferError):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert outcomes(link) == {"corrupt": 1}
        assert await link.next_end() is ReleaseReason.RELEASED


async def test_a_block_freed_before_confirm_makes_the_transfer_invalid():
    transport = FaultyTransport(Fault(FaultKind.DELAY, 8))
    async with kv_link(transport) as link:
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await transport.wait_reached()
        link.source.generations[3] += 1  # block 3 was read; now the pool has it again
        transport.resume()
        with pytest.raises(InvalidTransferError):
            await pulling
        await transfer.wait_quiesced()
        assert outcomes(link) == {"invalid": 1}
        stats = link.receiver.stats()
        assert stats.bytes_discarded == {"faulty": 6 * link.source.bytes_per_block}
        assert stats.bytes_published == {"faulty": 0}
        assert stats.seconds_lost["invalid"] > 0


async def test_a_lease_that_expires_under_a_slow_fetch_ends_it():
    clock = FakeClock()
    transport = FaultyTransport(Fault(FaultKind.DELAY, 8))
    async with kv_link(transport, clock=clock) as link:
        pulling = asyncio.create_task(link.incoming(link.offer()).pull())
        await transport.wait_reached()
        clock.advance(5.0)
        assert await link.next_end() is ReleaseReason.EXPIRED
        transport.resume()
        with pytest.raises((LeaseLostError, InvalidTransferError)):
            await pulling
        assert link.receiver.stats().blocks_published == 0


async def test_leases_are_renewed_while_a_fetch_waits():
    transport = FaultyTransport(Fault(FaultKind.DELAY, 4))
    async with kv_link(transport, lease_s=0.05) as link:
        pulling = asyncio.create_task(link.incoming(link.offer()).pull())
        await transport.wait_reached()
        await until(lambda: transport.renewals >= 3)
        transport.resume()
        await pulling
        assert link.sender.stats().renewals >= 3


async def test_a_refused_renewal_fails_the_transfer_while_it_waits():
    transport = FaultyTransport(Fault(FaultKind.HANG, 4))
    transport.refuse_renewals = LeaseLostError("expired")
    async with kv_link(transport, lease_s=0.05) as link:
        with pytest.raises(LeaseLostError, match="expired"):
            await link.incoming(link.offer()).pull()


async def test_a_revoked_transfer_fails_on_the_receiver_at_once_with_the_reason():
    async with kv_link(FaultyTransport(), lease_s=500.0, sweep_s=100.0) as link:
        key = link.open()
        link.sender.grant(key, link.blocks()[:2], None)
        pulling = asyncio.create_task(link.incoming(key).pull())
        await until(lambda: link.receiver.stats().active == 1)
        link.sender.revoke(key, "the step failed")
        with pytest.raises(LeaseLostError, match="the step failed"):
            await pulling


@pytest.mark.parametrize("piece", range(PIECES))
async def test_cancelling_the_puller_at_any_piece_ends_the_transfer(piece):
    transport = FaultyTransport(Fault(FaultKind.HANG, piece))
    async with kv_link(transport) as link:
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await transport.wait_reached()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await transfer.wait_quiesced()
        assert outcomes(link) == {"cancelled": 1}
        await link.next_end()


async def test_cancelling_before_the_first_step_quiesces_too():
    async with kv_link(FaultyTransport()) as link:
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await asyncio.sleep(0)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await transfer.wait_quiesced()
        transfer.release()


async def test_quiescence_waits_for_the_fence_however_often_it_is_cancelled():
    transport = FaultyTransport(Fault(FaultKind.HANG, 5))
    async with kv_link(transport) as link:
        transport.hold_fence()
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await transport.wait_reached()
        pulling.cancel()
        await transport.wait_closing()
        transfer.release()
        transfer.release()
        waiting = asyncio.create_task(transfer.wait_quiesced())
        impatient = asyncio.create_task(transfer.wait_quiesced())
        await asyncio.sleep(0)
        impatient.cancel()
        await link.turned()
        assert not waiting.done()
        transport.pass_fence()
        await waiting


async def test_release_ends_a_running_pull_once_and_may_be_repeated():
    transport = FaultyTransport(Fault(FaultKind.HANG, 5))
    async with kv_link(transport) as link:
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await transport.wait_reached()
        transfer.release()
        transfer.release()
        with pytest.raises(LeaseLostError, match="released"):
            await pulling
        await transfer.wait_quiesced()
        transfer.release()
        assert await link.next_end() is ReleaseReason.RELEASED


async def test_a_transfer_released_before_its_pull_asks_for_nothing():
    async with kv_link(FaultyTransport()) as link:
        transfer = link.incoming(link.offer())
        transfer.release()
        with pytest.raises(LeaseLostError, match="before"):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert outcomes(link) == {}


async def test_a_transfer_is_pulled_once():
    async with kv_link(FaultyTransport()) as link:
        transfer = link.incoming(link.offer())
        await transfer.pull()
        with pytest.raises(RuntimeError, match="once"):
            await transfer.pull()
        await transfer.wait_quiesced()
        transfer.release()


async def test_close_ends_running_transfers_after_their_fence():
    transport = FaultyTransport(Fault(FaultKind.HANG, 5))
    async with kv_link(transport) as link:
        transport.hold_fence()
        transfer = link.incoming(link.offer())
        pulling = asyncio.create_task(transfer.pull())
        await transport.wait_reached()
        closing = asyncio.create_task(link.receiver.close())
        await transport.wait_closing()
        assert not closing.done()
        transport.pass_fence()
        await closing
        with pytest.raises(LeaseLostError):
            await pulling
        await transfer.wait_quiesced()
        transfer.release()
        await link.receiver.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]


async def test_a_broken_fence_is_told_to_who_waits_for_it():
    class Leaky(FaultyTransport):
        async def wait_fence(self):
            raise OSError("cannot tell")

    async with kv_link(Leaky(Fault(FaultKind.DIE, 4))) as link:
        transfer = link.incoming(link.offer())
        with pytest.raises(OSError, match="cannot tell"):
            await transfer.pull()
        with pytest.raises(OSError, match="cannot tell"):
            await transfer.wait_quiesced()
        assert outcomes(link) == {"fence_broken": 1}


async def test_no_common_transport_is_refused_with_both_lists():
    class Other(FaultyTransport):
        name = "other"

    async with kv_link(FaultyTransport(), receiving=Other()) as link:
        with pytest.raises(LinkRefusedError, match=r"faulty.*other"):
            link.incoming(link.offer())


async def test_a_peer_that_does_not_fit_is_refused_before_anything_is_sent():
    async with kv_link(FaultyTransport()) as link:
        link.peer = dataclasses.replace(link.peer, fingerprint="0" * 32)
        with pytest.raises(LinkRefusedError, match="fingerprint"):
            link.incoming(link.offer())


async def test_blocks_of_one_size_too_many_are_refused_before_anything_is_asked():
    transport = FaultyTransport()
    scratch = ScratchArenas(max_arenas=1)
    scratch.of(512)
    async with rank_link(transport, source_size=8, scratch=scratch) as link:
        with pytest.raises(LinkRefusedError, match=r"cannot be repacked beside those of \[512\]"):
            link.incoming()
        assert link.receiver.stats().by_outcome == {}


async def test_one_owner_that_has_not_all_heads_is_refused():
    """One source of a sequence is the whole of it, or nothing is pulled."""
    transport = FaultyTransport()
    async with rank_link(transport, transport) as link:
        owner = link.owners[1]
        with pytest.raises(LinkRefusedError, match="add up: 2 to 3 on prefill-1, 0 to 3 on decode"):
            link.receiver.transfer(owner.info, link.key(owner), PLACES, NUM_TOKENS, 1.0)


async def test_a_better_transport_that_does_not_start_here_is_said_of_the_link():
    transport = FaultyTransport()
    better = Offer(name="better", cross_host=True, is_broken=True)
    async with kv_link(transport) as link:
        receiver = KVReceiver(
            memory=link.destination, me=link.me, transports=[transport], broken=[better]
        )
        other = dataclasses.replace(
            link.peer,
            fingerprint="0" * 32,
            block_size=2 * link.peer.block_size,
            bytes_per_block=2 * link.peer.bytes_per_block,
        )
        for peer in (link.peer, other):
            receiver.transfer(peer, link.offer(f"of {peer.block_size}"), PLACES, NUM_TOKENS, 1.0)
            chosen = receiver.stats().links[peer.worker_id]
            assert chosen.transport == transport.name
            assert chosen.reason is LinkReason.BROKEN


@pytest.mark.parametrize("places", [PLACES[:5], [*PLACES[:5], BlockId(16)], [BlockId(1)] * 6])
async def test_a_placement_that_cannot_be_is_refused(places):
    async with kv_link(FaultyTransport()) as link:
        with pytest.raises(ValueError, match="placement"):
            link.incoming(link.offer(), places)


async def test_a_restarted_prefill_worker_is_refused_at_once():
    async with kv_link(FaultyTransport()) as link:
        key = dataclasses.replace(link.offer(), prefill_incarnation="p-0")
        with pytest.raises(LinkRefusedError, match="p-0"):
            await link.incoming(key).pull()
        assert outcomes(link) == {"link_refused": 1}


async def test_a_worker_that_has_gone_is_lost():
    async with kv_link(FaultyTransport()) as link:
        key = link.offer()
        await link.sender.close()
        with pytest.raises(PeerLostError):
            await link.incoming(key).pull()
