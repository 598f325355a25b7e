"""What every stream transport must do, on real sockets, both ends in this process."""

import asyncio
import dataclasses
import threading

import psutil
import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import ReleaseReason, Verdict
from kv_transfer.transport import (
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.transports import wire
from tests.fakes.block_memory import ByteMemory, granted_blocks, peer_info, transfer_key
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import BLOCK_SIZE, FIRST, PLACES, kv_link, places_of, seen_by
from tests.fakes.stream_kinds import CUDA_IPC, QUICK, TORCH_DEVICE
from tests.fakes.stream_proxy import Damage, stream_proxy
from tests.fakes.until import until


async def test_bytes_arrive_and_the_owner_learns_that_they_did(kind):
    async with kv_link(kind.transport()) as link:
        landed = await link.incoming(link.offer()).pull()
        assert landed.num_blocks == 6
        assert link.has_arrived()
        assert await link.next_end() is ReleaseReason.CONFIRMED


async def test_blocks_over_the_fetch_and_batch_limits_arrive(kind, monkeypatch):
    monkeypatch.setattr(wire, "MAX_BLOCKS_PER_FETCH", 2)
    async with kv_link(kind.transport()) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


async def test_one_grant_of_a_hundred_thousand_tokens_arrives(kind):
    """F48: more blocks than fit into one request, and more bytes than the sockets hold.

    Of small blocks whose fingerprints are made one by one, only as many as one request is short of.
    """
    num_tokens = 20_000 if kind in (CUDA_IPC, TORCH_DEVICE) else 100_000
    num_blocks = num_tokens // BLOCK_SIZE
    async with kv_link(kind.transport(), num_blocks=num_blocks, block_bytes=1024) as link:
        key = link.open()
        ids = list(range(num_blocks))
        blocks = granted_blocks(num_blocks * BLOCK_SIZE, BLOCK_SIZE, ids)
        assert link.sender.grant(key, blocks, FIRST)
        places = [BlockId(block_id) for block_id in reversed(ids)]
        transfer = link.receiver.transfer(
            link.peer, key, places, num_blocks * BLOCK_SIZE, deadline_s=50.0
        )
        assert (await transfer.pull()).num_blocks == num_blocks > wire.MAX_BLOCKS_PER_FETCH
        assert all(
            link.source.block(BlockId(block_id)) == link.destination.block(place)
            for block_id, place in zip(ids, places, strict=True)
        )


async def answered_bytes(kind):
    """Bytes that an undamaged hand-off of the link's prompt takes from the server."""
    async with (
        kv_link(kind.transport(), block_bytes=32) as link,
        stream_proxy(kind, link.address, Damage.FLIP, []) as (address, proxy),
    ):
        await link.incoming(link.offer("first")).pull()  # may say what is said once per peer
        link.reach_at(kind.name, address)
        await link.incoming(link.offer()).pull()
        await until(lambda: proxy.answered > 0)
        return proxy.answered


@pytest.mark.parametrize("damage", [Damage.FLIP, Damage.CUT])
async def test_one_damaged_byte_anywhere_fails_the_transfer(kind, damage):
    """Nothing of the stream is redundant: no byte of it may change or end it unnoticed."""
    total = await answered_bytes(kind)
    offsets = list(range(0, total, 5))
    transport, clock = kind.transport(timings=QUICK), FakeClock()
    async with kv_link(transport, clock=clock, block_bytes=32, num_blocks=6 * 64) as link:
        async with stream_proxy(kind, link.address, damage, offsets) as (address, _):
            link.reach_at(kind.name, address)
            for start in range(0, len(offsets), 64):
                names = [f"{start + i}" for i in range(len(offsets[start : start + 64]))]
                transfers = [
                    link.incoming(link.offer(name), places_of(i), deadline_s=1.0)
                    for i, name in enumerate(names)
                ]
                results = await asyncio.gather(
                    *(transfer.pull() for transfer in transfers), return_exceptions=True
                )
                assert all(isinstance(result, TransferError) for result in results), results
                for transfer in transfers:
                    await transfer.wait_quiesced()
        assert link.receiver.stats().blocks_published == 0
        clock.advance(5.0)  # on a busy machine some may have failed before they had a session
        await until(lambda: len(link.ended) == len(offsets))
    assert len({key for key, _ in link.ended}) == len(offsets)


@pytest.mark.parametrize("at", [0, 30, 400, 600, 800])
async def test_a_peer_that_falls_silent_is_lost(kind, at):
    async with (
        kv_link(kind.transport(timings=QUICK)) as link,
        stream_proxy(kind, link.address, Damage.STALL, [at]) as (address, _),
    ):
        link.reach_at(kind.name, address)
        transfer = link.incoming(link.offer())
        with pytest.raises(PeerLostError, match=r"nothing from|no answer"):
            await transfer.pull()
        await transfer.wait_quiesced()


async def test_an_owner_that_computes_for_long_is_not_lost(kind):
    async with kv_link(kind.transport(timings=QUICK), lease_s=0.5) as link:
        key = link.open()
        pulling = asyncio.create_task(link.incoming(key).pull())
        # Ten renewals take a second, more than twice the silence that counts as a lost peer.
        await until(lambda: link.sender.stats().renewals >= 10)
        assert link.sender.grant(key, link.blocks(), FIRST)
        await pulling


async def test_nobody_at_the_address_is_a_lost_peer(kind):
    async with kv_link(kind.transport(timings=QUICK)) as link:
        gone, address = kind.listen()
        gone.close()
        link.reach_at(kind.name, address)
        with pytest.raises(PeerLostError, match="cannot connect"):
            await link.incoming(link.offer()).pull()


async def test_a_mute_address_is_a_lost_peer(kind):
    async with kv_link(kind.transport(timings=QUICK)) as link:
        mute, address = kind.listen()
        with mute:
            link.reach_at(kind.name, address)
            with pytest.raises(PeerLostError, match="no answer"):
                await link.incoming(link.offer()).pull()


async def test_another_process_at_the_address_is_refused(kind):
    async with kv_link(kind.transport()) as link:
        link.peer = dataclasses.replace(link.peer, incarnation="p-0")
        with pytest.raises(LinkRefusedError, match="who answers is not p-0"):
            await link.incoming(link.offer()).pull()


async def test_a_peer_without_endpoint_is_refused(kind):
    transport = kind.transport()
    me = peer_info("d", "d-1", bytes_per_block=8)
    with pytest.raises(LinkRefusedError, match=f"no {kind.name} endpoint"):
        await transport.connect(
            seen_by(transport, ByteMemory(1, 8)),
            peer_info("p", "p-1", bytes_per_block=8),
            transfer_key(),
            me,
        )


async def test_a_fetch_under_an_ended_lease_is_refused(kind):
    transport = kind.transport()
    async with kv_link(transport) as link:
        key = link.offer()
        session = await transport.connect(link.into, link.peer, key, link.me)
        grants = [grant async for grant in session.grants()]
        blocks = grants[0].blocks
        link.sender.revoke(key, "the step failed")
        with pytest.raises(LeaseLostError, match="the step failed"):
            async for _ in session.fetch(
                blocks, {block.logical: PLACES[block.logical] for block in blocks}
            ):
                pass
        await session.close()
        await transport.close()


async def test_a_confirm_can_meet_a_renewal_on_its_way(kind):
    transport = kind.transport()
    async with kv_link(transport) as link:
        key = link.offer()
        session = await transport.connect(link.into, link.peer, key, link.me)
        grants = [grant async for grant in session.grants()]
        for grant in grants:
            places = {block.logical: PLACES[block.logical] for block in grant.blocks}
            assert [block async for block in session.fetch(grant.blocks, places)] == list(
                grant.blocks
            )
        confirming = asyncio.create_task(session.confirm())
        await asyncio.sleep(0)
        await session.renew()
        assert await confirming is Verdict.VALID
        await session.close()
        await transport.close()
        assert link.has_arrived()


async def test_a_hundred_transfers_leave_no_descriptor_and_no_thread_behind(kind):
    async with kv_link(kind.transport()) as link:

        async def round_trip(name):
            key = link.offer(name)
            await link.incoming(key).pull()
            assert await link.next_end() is ReleaseReason.CONFIRMED

        await round_trip("warm")
        process = psutil.Process()

        def held():
            return process.num_fds(), threading.active_count()

        before = held()
        for number in range(100):
            await round_trip(f"t{number}")
        # Its end of a connection is closed by the server a moment after the transfer.
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        assert link.receiver.stats().by_outcome == {"landed": 101}
