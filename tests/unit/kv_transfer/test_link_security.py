"""Nothing of a connection is parsed before both ends have proved to know the secret."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket

import pytest

from kv_transfer import doorkeeper
from kv_transfer.authentication import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Initiator,
    Purpose,
    Secret,
)
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import NotAuthenticatedError
from kv_transfer.transports import wire
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.wire import FrameType, Identity
from tests.fakes.block_memory import transfer_key
from tests.fakes.kv_link import POISON, kv_link
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import SECRET, STREAM_KINDS
from tests.fakes.until import until

OTHER_SECRET = Secret("the secret of another deployment altogether")
PATIENT = StreamTimings(connect_s=60.0)
HELLO = wire.control_frame(Identity.of(transfer_key()), FrameType.HELLO, b"{}")


@pytest.fixture(params=STREAM_KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture
def parsed(monkeypatch):
    """What has been parsed, by the name of the parser."""
    names = []
    for name in ("parse_header", "unpack_hello", "unpack_welcome", "unpack_error"):
        parse = getattr(wire, name)

        def noted(*arguments, name=name, parse=parse):
            names.append(name)
            return parse(*arguments)

        monkeypatch.setattr(wire, name, noted)
    return names


def strangers(link):
    return link.sender.stats().strangers


@pytest.mark.parametrize("theirs", ["prefill", "decode"])
async def test_another_secret_is_refused_before_anything_is_parsed(kind, theirs, parsed):
    ours, other = kind.transport(), kind.transport(secret=OTHER_SECRET)
    serving, receiving = (other, ours) if theirs == "prefill" else (ours, other)
    async with kv_link(serving, receiving=receiving) as link:
        key = link.offer()
        with pytest.raises(NotAuthenticatedError, match=r"prefill-0: .*different secrets"):
            await link.incoming(key).pull()
        await until(lambda: strangers(link) == 1)
        assert parsed == []
        assert link.ended == []
        assert link.receiver.stats().by_outcome["not_authenticated"] == 1
        assert set(link.destination.block(0)) == {POISON}


async def test_who_knows_the_secret_is_no_stranger(kind):
    async with kv_link(kind.transport()) as link:
        await link.incoming(link.offer()).pull()
        assert strangers(link) == 0


GARBAGE = [
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * RESPONSE_BYTES,
    b"\x16\x03\x01" + b"\x00" * 200,
    os.urandom(4096),
    HELLO * 10,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "tls", "noise", "hello"])
async def test_garbage_ends_its_own_connection_and_reaches_no_parser(kind, garbage, parsed):
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        async with RawPeer(kind, link.address) as stranger:
            stranger.writer.write(garbage)
            assert await stranger.is_dropped()
        await until(lambda: strangers(link) == 1)
        assert parsed == []
        await link.incoming(link.offer()).pull()


async def test_a_recorded_handshake_is_refused(kind, parsed):
    """Replay: everything that a receiver has said, its greeting included, said again."""
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as receiver:
            initiator = Initiator(secret=SECRET, purpose=Purpose.KV_LINK, me="d-1", peer="p-1")
            recorded = initiator.answer(await receiver.challenge()).response
            receiver.writer.write(recorded)
            await receiver.reader.readexactly(PROOF_BYTES)
            hello = wire.control_frame(
                receiver.identity, FrameType.HELLO, wire.pack_hello(key, link.me)
            )
            receiver.writer.write(hello)
            assert (await receiver.hear())[0].kind is FrameType.WELCOME
        assert await link.next_end() is ReleaseReason.PEER_LOST
        parsed.clear()
        async with RawPeer(kind, link.address, key) as stranger:
            stranger.writer.write(recorded + hello)
            assert await stranger.is_dropped()
        await until(lambda: strangers(link) == 1)
        assert parsed == []


async def test_what_the_server_says_proves_nothing_when_it_is_sent_back(kind, parsed):
    """Reflection: of its own challenge, and of a challenge that another connection was given."""
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        async with RawPeer(kind, link.address) as first, RawPeer(kind, link.address) as second:
            own, others = await first.challenge(), await second.challenge()
            first.writer.write(own + own[-PROOF_BYTES:])
            second.writer.write(own + others[-PROOF_BYTES:])
            assert await first.is_dropped()
            assert await second.is_dropped()
        await until(lambda: strangers(link) == 2)
        assert parsed == []


async def test_a_server_that_knows_no_secret_learns_nothing_from_a_receiver(kind, parsed):
    """An impostor at the address, under the right name, that lets everybody in."""
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        async with RawPeer(kind, link.address) as watching:
            challenge = await watching.challenge()
        listener, address = kind.listen()
        heard = b""

        async def impersonate(reader, writer):
            nonlocal heard
            writer.write(challenge)
            heard = await reader.readexactly(RESPONSE_BYTES)
            writer.write(heard[-PROOF_BYTES:])  # sends the receiver's own proof back
            heard += await reader.read()
            writer.close()

        start = asyncio.start_unix_server if kind.name == "shm" else asyncio.start_server
        async with await start(impersonate, sock=listener):
            link.peer = dataclasses.replace(link.peer, endpoints=((kind.name, address),))
            with pytest.raises(NotAuthenticatedError, match="does not know the deployment's"):
                await link.incoming(link.offer()).pull()
            await until(lambda: len(heard) >= RESPONSE_BYTES)
        assert len(heard) == RESPONSE_BYTES
        assert parsed == []


@pytest.mark.parametrize("size", [0, 1, RESPONSE_BYTES - 1])
async def test_a_truncated_response_is_refused(kind, size, parsed):
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        async with RawPeer(kind, link.address) as stranger:
            initiator = Initiator(secret=SECRET, purpose=Purpose.KV_LINK, me="d-1", peer="p-1")
            response = initiator.answer(await stranger.challenge()).response
            stranger.writer.write(response[:size])
            stranger.writer.write_eof()
            assert await stranger.is_dropped()
        await until(lambda: strangers(link) == 1)
        assert parsed == []


async def test_who_proves_itself_a_byte_at_a_time_is_dropped_at_the_deadline(kind, parsed):
    """The deadline is of the whole greeting, so that no dripping keeps a connection for ever."""
    timings = StreamTimings(connect_s=0.3)
    async with kv_link(kind.transport(timings=timings)) as link:
        async with RawPeer(kind, link.address) as slow:
            dropped = asyncio.create_task(slow.is_dropped())
            while not dropped.done():
                slow.writer.write(b"B")
                await asyncio.wait({dropped}, timeout=0.02)
            assert await dropped
        await until(lambda: strangers(link) == 1)
        assert parsed == []


async def test_strangers_that_fill_every_place_make_room_for_who_proves_itself(kind, monkeypatch):
    monkeypatch.setattr(doorkeeper, "MAX_CONNECTIONS", 2)
    async with (
        kv_link(kind.transport(timings=PATIENT)) as link,
        RawPeer(kind, link.address) as first,
        RawPeer(kind, link.address) as second,
    ):
        await first.challenge()
        await second.challenge()
        assert (await link.incoming(link.offer()).pull()).num_blocks == 6
        assert await first.is_dropped()
        assert strangers(link) == 1


async def test_a_greeting_under_another_name_than_the_proof_is_refused(kind):
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        key = link.offer()
        async with RawPeer(kind, link.address, key) as liar:
            await liar.prove(me="another process")
            await liar.say(FrameType.HELLO, wire.pack_hello(key, link.me))
            assert await liar.is_dropped()
        assert link.ended == []
        assert strangers(link) == 0
        await link.incoming(key).pull()


@pytest.mark.parametrize("claimed", ["d-1", "d-2"])
async def test_a_transfer_is_for_the_process_that_proved_itself_alone(kind, claimed):
    """Another of the deployment's own, whatever the transfer's key says, and whoever opened it."""
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        key = link.offer()
        other = dataclasses.replace(link.me, incarnation="d-2")
        said = dataclasses.replace(key, decode_incarnation=claimed)
        async with RawPeer(kind, link.address, said) as rogue:
            await rogue.prove(me="d-2")
            await rogue.say(FrameType.HELLO, wire.pack_hello(said, other))
            assert "incarnation d-1, " in str(await rogue.hear_error())
        assert link.ended == []
        await link.incoming(key).pull()


async def test_the_server_says_nothing_more_than_its_challenge_to_a_stranger(kind):
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        with kind.connect(link.address) as stranger:
            stranger.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(stranger, os.urandom(RESPONSE_BYTES))
            heard = b""
            async with asyncio.timeout(10):
                while part := await loop.sock_recv(stranger, 4096):
                    heard += part
        assert len(heard) == CHALLENGE_BYTES


async def test_a_stranger_that_leaves_at_once_is_counted(kind):
    async with kv_link(kind.transport(timings=PATIENT)) as link:
        stranger = kind.connect(link.address)
        stranger.shutdown(socket.SHUT_RDWR)
        stranger.close()
        await until(lambda: strangers(link) == 1)
