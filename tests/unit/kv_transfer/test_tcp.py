"""The tcp transport on loopback sockets, both ends in this process."""

import asyncio
import dataclasses
import os
import socket

import psutil
import pytest

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import ReleaseReason, Verdict
from kv_transfer.transport import (
    CorruptTransferError,
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.transports import stream_server, wire
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Identity
from tests.fakes.block_memory import ByteMemory, peer_info, transfer_key
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, PLACES, POISON, kv_link
from tests.fakes.tcp_proxy import Damage, tcp_proxy
from tests.fakes.until import until

QUICK = StreamTimings(connect_s=1.0, silence_s=0.4, keep_alive_s=0.05)


def places_of(number):
    """Six destination blocks of their own for each transfer."""
    return [BlockId(number * 6 + i) for i in range(6)]


class RawPeer:
    """Says whatever a test wants to a server, frame by frame."""

    def __init__(self, address, key=None):
        host, _, port = address.rpartition(":")
        self.where = (host, int(port))
        self.identity = Identity.of(key or transfer_key())

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection(*self.where)
        return self

    async def __aexit__(self, *_):
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)

    async def say(self, kind, payload=b""):
        self.writer.write(wire.control_frame(self.identity, kind, payload))
        await self.writer.drain()

    async def hear(self):
        async with asyncio.timeout(10):
            header = wire.parse_header(await self.reader.readexactly(HEADER_BYTES))
            return header, await self.reader.readexactly(header.length)

    async def hear_error(self):
        while True:
            header, payload = await self.hear()
            if header.kind is FrameType.ERROR:
                return wire.unpack_error(payload)

    async def is_dropped(self):
        async with asyncio.timeout(10):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return True
            return True

    async def greet(self, key, me):
        await self.say(FrameType.HELLO, wire.pack_hello(key, me))
        header, _ = await self.hear()
        assert header.kind is FrameType.WELCOME


def via(link, address):
    link.peer = dataclasses.replace(link.peer, endpoints=(("tcp", address),))


async def test_bytes_arrive_and_the_owner_learns_that_they_did():
    async with kv_link(TcpTransport()) as link:
        landed = await link.incoming(link.offer()).pull()
        assert landed.num_blocks == 6
        assert link.has_arrived()
        assert await link.next_end() is ReleaseReason.CONFIRMED


async def test_blocks_over_the_fetch_and_batch_limits_arrive(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BLOCKS_PER_FETCH", 2)
    async with kv_link(TcpTransport()) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


async def test_only_the_configured_host_listens_and_a_receiver_does_not():
    async with kv_link(TcpTransport()) as link:
        address = link.address
        listening = {
            (c.laddr.ip, c.laddr.port)
            for c in psutil.Process(os.getpid()).net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }
        assert listening == {("127.0.0.1", int(address.rpartition(":")[2]))}


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_an_ipv6_address_works():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    async with kv_link(TcpTransport(host="::1")) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


async def answered_bytes():
    """Bytes that an undamaged hand-off of the link's prompt takes from the server."""
    async with (
        kv_link(TcpTransport(), block_bytes=32) as link,
        tcp_proxy(link.address, Damage.FLIP, []) as (address, proxy),
    ):
        via(link, address)
        await link.incoming(link.offer()).pull()
        await until(lambda: proxy.answered > 0)
        return proxy.answered


@pytest.mark.parametrize("damage", [Damage.FLIP, Damage.CUT])
async def test_one_damaged_byte_anywhere_fails_the_transfer(damage):
    """Nothing of the stream is redundant: no byte of it may change or end it unnoticed."""
    total = await answered_bytes()
    offsets = list(range(0, total, 5))
    transport, clock = TcpTransport(timings=QUICK), FakeClock()
    async with kv_link(transport, clock=clock, block_bytes=32, num_blocks=6 * 64) as link:
        async with tcp_proxy(link.address, damage, offsets) as (address, _):
            via(link, address)
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


@pytest.mark.parametrize("at", [0, 30, 400, 900, 1500])
async def test_a_peer_that_falls_silent_is_lost(at):
    async with (
        kv_link(TcpTransport(timings=QUICK)) as link,
        tcp_proxy(link.address, Damage.STALL, [at]) as (address, _),
    ):
        via(link, address)
        transfer = link.incoming(link.offer())
        with pytest.raises(PeerLostError, match=r"nothing from|no answer"):
            await transfer.pull()
        await transfer.wait_quiesced()


async def test_an_owner_that_computes_for_long_is_not_lost():
    async with kv_link(TcpTransport(timings=QUICK), lease_s=0.5) as link:
        key = link.open()
        pulling = asyncio.create_task(link.incoming(key).pull())
        # Ten renewals take a second, more than twice the silence that counts as a lost peer.
        await until(lambda: link.sender.stats().renewals >= 10)
        assert link.sender.grant(key, link.blocks(), FIRST)
        await pulling


async def test_nobody_at_the_address_is_a_lost_peer():
    async with kv_link(TcpTransport(timings=QUICK)) as link:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        via(link, f"127.0.0.1:{port}")
        with pytest.raises(PeerLostError, match="cannot connect"):
            await link.incoming(link.offer()).pull()


async def test_a_mute_address_is_a_lost_peer():
    async with kv_link(TcpTransport(timings=QUICK)) as link:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            via(link, f"127.0.0.1:{mute.getsockname()[1]}")
            with pytest.raises(PeerLostError, match="no answer"):
                await link.incoming(link.offer()).pull()


async def test_another_process_at_the_address_is_refused():
    async with kv_link(TcpTransport()) as link:
        link.peer = dataclasses.replace(link.peer, incarnation="p-0")
        with pytest.raises(LinkRefusedError, match="p-1, wanted p-0"):
            await link.incoming(link.offer()).pull()


async def test_a_peer_without_endpoint_is_refused():
    transport = TcpTransport()
    me = peer_info("d", "d-1", bytes_per_block=8)
    with pytest.raises(LinkRefusedError, match="no tcp endpoint"):
        await transport.connect(
            ByteMemory(1, 8), peer_info("p", "p-1", bytes_per_block=8), transfer_key(), me
        )


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
async def test_garbage_at_the_port_costs_the_other_transfers_nothing(garbage):
    async with kv_link(TcpTransport(timings=QUICK)) as link:
        key = link.offer()
        async with RawPeer(link.address) as stranger:
            stranger.writer.write(garbage)
            assert (await link.incoming(key).pull()).num_blocks == 6
            assert await stranger.is_dropped()


async def test_a_stranger_cannot_announce_more_than_a_greeting():
    patient = StreamTimings(connect_s=60.0)
    async with kv_link(TcpTransport(timings=patient)) as link:
        frame = wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO, bytes(1 << 20))
        async with RawPeer(link.address) as stranger:
            stranger.writer.write(frame[:HEADER_BYTES])  # and the rest never comes
            assert await stranger.is_dropped()


async def test_connections_over_the_limit_are_dropped_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(stream_server, "MAX_CONNECTIONS", 1)
    async with kv_link(TcpTransport()) as link:
        key = link.offer()
        async with RawPeer(link.address, key) as first:
            await first.greet(key, link.me)
            async with RawPeer(link.address) as second:
                assert await second.is_dropped()
            await first.say(FrameType.CONFIRM)
            while (await first.hear())[0].kind is not FrameType.VERDICT:
                pass
        assert await link.next_end() is ReleaseReason.CONFIRMED


async def test_an_unknown_transfer_is_told_so():
    async with kv_link(TcpTransport()) as link:
        key = transfer_key("unknown")
        async with RawPeer(link.address, key) as stranger:
            await stranger.say(FrameType.HELLO, wire.pack_hello(key, link.me))
            error = await stranger.hear_error()
            assert isinstance(error, LinkRefusedError)
            assert "unknown" in str(error)
            assert await stranger.is_dropped()


async def test_a_greeting_for_one_transfer_in_frames_of_another_is_dropped():
    async with kv_link(TcpTransport()) as link:
        key = link.open()
        async with RawPeer(link.address, transfer_key("other")) as stranger:
            await stranger.say(FrameType.HELLO, wire.pack_hello(key, link.me))
            assert await stranger.is_dropped()
        assert link.ended == []


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (FrameType.GRANT, b""),
        (FrameType.VERDICT, b"valid"),
        (FrameType.HELLO, b""),
        (FrameType.FETCH, b"\xff\xff\xff\xff"),
    ],
)
async def test_a_receiver_that_breaks_the_protocol_ends_its_transfer_alone(kind, payload):
    async with kv_link(TcpTransport()) as link:
        bad, good = link.offer("bad"), link.offer("good")
        async with RawPeer(link.address, bad) as rogue:
            await rogue.greet(bad, link.me)
            await rogue.say(kind, payload)
            assert isinstance(await rogue.hear_error(), CorruptTransferError)
            assert await link.next_end() is ReleaseReason.PEER_LOST
        await link.incoming(good).pull()


async def test_the_receiver_closes_first_after_the_verdict():
    """A server that closes with a renewal unread could take the verdict back from the wire."""
    async with kv_link(TcpTransport(timings=StreamTimings(silence_s=1.0))) as link:
        key = link.offer()
        async with RawPeer(link.address, key) as peer:
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
async def test_a_block_outside_the_grant_is_not_sent(change):
    async with kv_link(TcpTransport()) as link:
        key = link.open()
        link.sender.grant(key, link.blocks()[:2], None)
        asked = dataclasses.replace(link.blocks()[0], **change)
        async with RawPeer(link.address, key) as rogue:
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
            assert FrameType.DATA not in kinds


async def test_a_request_with_one_block_outside_the_grant_gets_none_of_its_blocks():
    async with kv_link(TcpTransport(), block_bytes=512 * 1024) as link:
        key = link.open()
        link.sender.grant(key, link.blocks()[:2], None)
        async with RawPeer(link.address, key) as rogue:
            await rogue.greet(key, link.me)
            await rogue.say(FrameType.FETCH, wire.pack_blocks(link.blocks()[:3]))
            kinds = []
            while FrameType.ERROR not in kinds:
                kinds.append((await rogue.hear())[0].kind)
            assert FrameType.DATA not in kinds


async def test_a_receiver_that_sends_a_block_is_cut_off():
    async with kv_link(TcpTransport()) as link:
        key = link.offer()
        async with RawPeer(link.address, key) as rogue:
            await rogue.greet(key, link.me)
            payload = memoryview(bytes(512))
            rogue.writer.write(wire.data_header(rogue.identity, link.blocks()[0], payload))
            assert isinstance(await rogue.hear_error(), CorruptTransferError)


async def test_a_receiver_that_disconnects_ends_its_transfer_at_once():
    async with kv_link(TcpTransport()) as link:
        key = link.offer()
        async with RawPeer(link.address, key) as gone:
            await gone.greet(key, link.me)
        assert await link.next_end() is ReleaseReason.PEER_LOST


async def test_a_receiver_that_reads_nothing_delays_no_other_and_ends_with_its_lease():
    clock = FakeClock()
    async with kv_link(TcpTransport(), clock=clock, block_bytes=4 * 1024 * 1024) as link:
        slow, good = link.offer("slow"), link.offer("good")
        async with RawPeer(link.address, slow) as sleeper:
            await sleeper.greet(slow, link.me)
            await sleeper.say(FrameType.FETCH, wire.pack_blocks(link.blocks()))
            await link.incoming(good).pull()
            assert link.has_arrived()
            assert await link.next_end() is ReleaseReason.CONFIRMED
            clock.advance(5.0)
            assert await link.next_end() is ReleaseReason.EXPIRED
            assert await sleeper.is_dropped()


async def test_freed_blocks_never_leave_even_in_the_middle_of_a_send():
    """What was sent before the lease ended is the old block; nothing of the new one follows."""
    clock = FakeClock()
    size = 16 * 1024 * 1024  # more than the socket buffers hold
    timings = StreamTimings(keep_alive_s=100.0)  # so that nothing but the send itself can notice
    async with kv_link(TcpTransport(timings=timings), clock=clock, block_bytes=size) as link:
        key = link.open()
        block = link.blocks()[0]
        link.source.block(block.block_id)[:] = b"\x01" * size
        link.sender.grant(key, [block], FIRST)
        async with RawPeer(link.address, key) as slow:
            await slow.greet(key, link.me)
            await slow.say(FrameType.FETCH, wire.pack_blocks([block]))
            header = None
            while header is None or header.kind is not FrameType.DATA:
                raw = await slow.reader.readexactly(HEADER_BYTES)
                header = wire.parse_header(raw)
                if header.kind is not FrameType.DATA:
                    await slow.reader.readexactly(header.length)
            clock.advance(5.0)
            assert await link.next_end() is ReleaseReason.EXPIRED
            link.source.block(block.block_id)[:] = b"\x02" * size  # the pool's next owner
            received = bytearray()
            try:
                while part := await slow.reader.read(1 << 20):
                    received += part
            except ConnectionError:
                pass
            assert len(received) < size
            assert 2 not in received


async def test_a_revoked_transfer_is_told_to_an_idle_receiver():
    async with kv_link(TcpTransport(timings=QUICK)) as link:
        key = link.offer()
        async with RawPeer(link.address, key) as idle:
            await idle.greet(key, link.me)
            grants = [(await idle.hear())[0].kind for _ in range(3)]
            assert grants == [FrameType.GRANT] * 3
            link.sender.revoke(key, "the step failed")
            error = await idle.hear_error()
            assert isinstance(error, LeaseLostError)
            assert "the step failed" in str(error)
            assert await idle.is_dropped()


async def test_a_fetch_under_an_ended_lease_is_refused():
    transport = TcpTransport()
    async with kv_link(transport) as link:
        key = link.offer()
        session = await transport.connect(link.destination, link.peer, key, link.me)
        grants = [grant async for grant in session.grants()]
        blocks = grants[0].blocks
        link.sender.revoke(key, "the step failed")
        with pytest.raises(LeaseLostError, match="the step failed"):
            async for _ in session.fetch(
                blocks, {block.logical: PLACES[block.logical] for block in blocks}
            ):
                pass
        await session.close()


async def test_a_confirm_can_meet_a_renewal_on_its_way():
    transport = TcpTransport()
    async with kv_link(transport) as link:
        key = link.offer()
        session = await transport.connect(link.destination, link.peer, key, link.me)
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
        assert link.has_arrived()


class RogueOwner:
    """Welcomes a receiver, waits for its fetch if told to, and sends one block as it likes."""

    def __init__(self, key, header, waits_for_fetch, copies=1):
        self.identity = Identity.of(key)
        self.header = header
        self.waits_for_fetch = waits_for_fetch
        self.copies = copies

    async def answer(self, reader, writer):
        hello = wire.parse_header(await reader.readexactly(HEADER_BYTES))
        await reader.readexactly(hello.length)
        owner = peer_info("prefill-0", "p-1", bytes_per_block=512)
        welcome = wire.pack_welcome(owner)
        writer.write(wire.control_frame(self.identity, FrameType.WELCOME, welcome))
        if self.waits_for_fetch:
            await reader.readexactly(HEADER_BYTES)
        for _ in range(self.copies):
            writer.write(self.header + b"\x55" * 512)
        await writer.drain()
        await reader.read()
        writer.close()

    async def serve(self, link):
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        via(link, f"{host}:{port}")
        return server


def is_untouched(memory):
    return all(set(memory.block(BlockId(i))) == {POISON} for i in range(memory.num_blocks))


async def test_a_block_that_was_not_asked_for_touches_no_memory():
    key = transfer_key()
    async with kv_link(TcpTransport()) as link:
        block = link.blocks()[0]
        header = wire.data_header(Identity.of(key), block, memoryview(b"\x55" * 512))
        async with await RogueOwner(key, header, waits_for_fetch=False).serve(link):
            session = await TcpTransport().connect(link.destination, link.peer, key, link.me)
            with pytest.raises(CorruptTransferError, match="not asked for"):
                async for _ in session.grants():
                    pass
            await session.close()
        assert is_untouched(link.destination)


@pytest.mark.parametrize(
    ("change", "length"),
    [({"generation": 7}, 512), ({"valid_tokens": 3}, 512), ({}, 256), ({}, 1024)],
)
async def test_a_block_with_another_label_or_length_touches_no_memory(change, length):
    key = transfer_key()
    async with kv_link(TcpTransport()) as link:
        block = link.blocks()[0]
        header = wire.data_header(
            Identity.of(key), dataclasses.replace(block, **change), memoryview(b"\x55" * length)
        )
        async with await RogueOwner(key, header, waits_for_fetch=True).serve(link):
            session = await TcpTransport().connect(link.destination, link.peer, key, link.me)
            with pytest.raises(CorruptTransferError, match="generation, tokens, bytes"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
            await session.close()
        assert is_untouched(link.destination)


async def test_a_block_that_comes_again_is_not_written_again():
    key = transfer_key()
    async with kv_link(TcpTransport()) as link:
        block = link.blocks()[0]
        header = wire.data_header(Identity.of(key), block, memoryview(b"\x55" * 512))
        async with await RogueOwner(key, header, waits_for_fetch=True, copies=2).serve(link):
            session = await TcpTransport().connect(link.destination, link.peer, key, link.me)
            landed = [b async for b in session.fetch([block], {block.logical: PLACES[0]})]
            assert landed == [block]
            with pytest.raises(CorruptTransferError, match="not asked for"):
                async for _ in session.grants():
                    pass
            await session.close()


async def test_a_block_with_a_wrong_digest_does_not_land():
    key = transfer_key()
    async with kv_link(TcpTransport()) as link:
        block = link.blocks()[0]
        header = wire.data_header(Identity.of(key), block, memoryview(b"\x54" * 512))
        async with await RogueOwner(key, header, waits_for_fetch=True).serve(link):
            session = await TcpTransport().connect(link.destination, link.peer, key, link.me)
            with pytest.raises(CorruptTransferError, match="digest"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
            await session.close()
