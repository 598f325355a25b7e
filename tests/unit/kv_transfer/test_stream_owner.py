"""What the owner of blocks answers to whoever connects, over every stream transport."""

import asyncio
import dataclasses
import os

import pytest

from kv_transfer import doorkeeper
from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import (
    CorruptTransferError,
    LeaseLostError,
    LinkRefusedError,
)
from kv_transfer.transports import wire
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Identity
from tests.fakes.block_memory import transfer_key
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import kv_link
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import QUICK

GARBAGE = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 100,
    b"\x16\x03\x01" + b"\x00" * 200,
    os.urandom(300),
    wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO)[:-10],
    wire.control_frame(Identity.of(transfer_key()), FrameType.RENEW),
    wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO, b"{}"),
    wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO, b"[" * 9000),
    b"",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_behind_a_proof_costs_the_other_transfers_nothing(kind, garbage):
    async with kv_link(kind.transport(timings=QUICK)) as link:
        key = link.offer()
        async with RawPeer(kind, link.address) as stranger:
            await stranger.prove()
            stranger.writer.write(garbage)
            assert (await link.incoming(key).pull()).num_blocks == 6
            assert await stranger.is_dropped()


async def test_a_peer_cannot_announce_more_than_a_greeting(kind):
    patient = StreamTimings(connect_s=60.0)
    async with kv_link(kind.transport(timings=patient)) as link:
        frame = wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO, bytes(1 << 20))
        async with RawPeer(kind, link.address) as peer:
            await peer.prove()
            peer.writer.write(frame[:HEADER_BYTES])  # and the rest never comes
            assert await peer.is_dropped()


async def test_connections_over_the_limit_are_dropped_and_the_others_go_on(kind, monkeypatch):
    monkeypatch.setattr(doorkeeper, "MAX_CONNECTIONS", 1)
    async with kv_link(kind.transport()) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as first:
            await first.greet(key, link.me)
            async with RawPeer(kind, link.address) as second:
                assert await second.is_dropped()
            await first.say(FrameType.CONFIRM)
            while (await first.hear())[0].kind is not FrameType.VERDICT:
                pass
        assert await link.next_end() is ReleaseReason.CONFIRMED


async def test_an_unknown_transfer_is_told_so(kind):
    async with kv_link(kind.transport()) as link:
        key = transfer_key("unknown")
        async with RawPeer(kind, link.address, key) as stranger:
            await stranger.prove()
            await stranger.say(FrameType.HELLO, wire.pack_hello(key, link.me))
            error = await stranger.hear_error()
            assert isinstance(error, LinkRefusedError)
            assert "unknown" in str(error)
            assert await stranger.is_dropped()


async def test_a_greeting_for_one_transfer_in_frames_of_another_is_dropped(kind):
    async with kv_link(kind.transport()) as link:
        key = link.open()
        async with RawPeer(kind, link.address, transfer_key("other")) as stranger:
            await stranger.prove()
            await stranger.say(FrameType.HELLO, wire.pack_hello(key, link.me))
            assert await stranger.is_dropped()
        assert link.ended == []


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (FrameType.GRANT, b""),
        (FrameType.VERDICT, b"valid"),
        (FrameType.HELLO, b""),
        (FrameType.FETCH, b"\xff\xff\xff\xff"),
    ],
)
async def test_a_receiver_that_breaks_the_protocol_ends_its_transfer_alone(kind, frame, payload):
    async with kv_link(kind.transport()) as link:
        bad, good = link.offer("bad"), link.offer("good")
        async with RawPeer(kind, link.address, bad) as rogue:
            await rogue.greet(bad, link.me)
            await rogue.say(frame, payload)
            assert isinstance(await rogue.hear_error(), CorruptTransferError)
            assert await link.next_end() is ReleaseReason.PEER_LOST
        await link.incoming(good).pull()


async def test_the_receiver_closes_first_after_the_verdict(kind):
    """A server that closes with a renewal unread could take the verdict back from the wire."""
    async with kv_link(kind.transport(timings=StreamTimings(silence_s=1.0))) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as peer:
            await peer.greet(key, link.me)
            await peer.say(FrameType.CONFIRM)
            await peer.say(FrameType.RENEW)
            kind = None
            while kind is not FrameType.VERDICT:
                kind = (await peer.hear())[0].kind
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await peer.reader.read(1)
            assert await peer.is_dropped()  # but not for ever


@pytest.mark.parametrize(
    "change", [{"block_id": BlockId(0)}, {"generation": 5}, {"logical": LogicalBlock(5)}]
)
async def test_a_block_outside_the_grant_is_not_sent(kind, change):
    async with kv_link(kind.transport()) as link:
        key = link.open()
        link.sender.grant(key, link.blocks()[:2], None)
        asked = dataclasses.replace(link.blocks()[0], **change)
        async with RawPeer(kind, link.address, key) as rogue:
            await rogue.greet(key, link.me)
            await rogue.say(FrameType.FETCH, wire.pack_blocks([asked]))
            kinds = []
            error = None
            while error is None:
                header, payload = await rogue.hear()
                kinds.append(header.kind)
                if header.kind is FrameType.ERROR:
                    error = wire.unpack_error(payload)
            assert isinstance(error, CorruptTransferError)
            assert kind.block_frame not in kinds


async def test_a_request_with_one_block_outside_the_grant_gets_none_of_its_blocks(kind):
    async with kv_link(kind.transport(), block_bytes=512 * 1024) as link:
        key = link.open()
        link.sender.grant(key, link.blocks()[:2], None)
        async with RawPeer(kind, link.address, key) as rogue:
            await rogue.greet(key, link.me)
            await rogue.say(FrameType.FETCH, wire.pack_blocks(link.blocks()[:3]))
            kinds = []
            while FrameType.ERROR not in kinds:
                kinds.append((await rogue.hear())[0].kind)
            assert kind.block_frame not in kinds


async def test_a_receiver_that_sends_a_block_is_cut_off(kind):
    async with kv_link(kind.transport()) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as rogue:
            await rogue.greet(key, link.me)
            payload = memoryview(bytes(512))
            rogue.writer.write(
                wire.block_header(rogue.identity, kind.block_frame, link.blocks()[0], payload)
            )
            assert isinstance(await rogue.hear_error(), CorruptTransferError)


async def test_a_receiver_that_disconnects_ends_its_transfer_at_once(kind):
    async with kv_link(kind.transport()) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as gone:
            await gone.greet(key, link.me)
        assert await link.next_end() is ReleaseReason.PEER_LOST


async def test_a_receiver_that_reads_nothing_delays_no_other_and_ends_with_its_lease(framed):
    clock = FakeClock()
    async with kv_link(framed.transport(), clock=clock, block_bytes=4 * 1024 * 1024) as link:
        slow, good = link.offer("slow"), link.offer("good")
        async with RawPeer(framed, link.address, slow) as sleeper:
            await sleeper.greet(slow, link.me)
            await sleeper.say(FrameType.FETCH, wire.pack_blocks(link.blocks()))
            await link.incoming(good).pull()
            assert link.has_arrived()
            assert await link.next_end() is ReleaseReason.CONFIRMED
            clock.advance(5.0)
            assert await link.next_end() is ReleaseReason.EXPIRED
            assert await sleeper.is_dropped()


async def test_a_revoked_transfer_is_told_to_an_idle_receiver(kind):
    async with kv_link(kind.transport(timings=QUICK)) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as idle:
            await idle.greet(key, link.me)
            grants = [(await idle.hear())[0].kind for _ in range(3)]
            assert grants == [FrameType.GRANT] * 3
            link.sender.revoke(key, "the step failed")
            error = await idle.hear_error()
            assert isinstance(error, LeaseLostError)
            assert "the step failed" in str(error)
            assert await idle.is_dropped()
