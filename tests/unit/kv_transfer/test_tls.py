"""KV over tcp inside TLS: the same transfer, and nobody else takes part in it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import asynccontextmanager

import psutil
import pytest

from kv_transfer.authentication import CHALLENGE_BYTES, RESPONSE_BYTES, Secret
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import NotAuthenticatedError, PeerLostError, TransferError
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tls import TlsContexts
from tests.fakes.certificates import Authority, CertificateFiles
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, kv_link, places_of
from tests.fakes.stream_kinds import QUICK, SECRET, TCP, tcp_transport
from tests.fakes.stream_proxy import Damage, stream_proxy
from tests.fakes.until import until


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def prefill(authority):
    return authority.issue("prefill").contexts()


@pytest.fixture(scope="module")
def decode(authority):
    return authority.issue("decode").contexts()


def tls_transport(
    tls: TlsContexts, *, timings: StreamTimings | None = None, secret: Secret = SECRET
) -> TcpTransport:
    return TcpTransport(security=LinkSecurity(secret=secret, tls=tls), timings=timings)


@asynccontextmanager
async def relay(link, between: TlsContexts | None):
    """Somebody on the wire passes all on; what it sees, inside a TLS of its own or from outside."""
    seen = bytearray()
    host, port = link.address.split(":")
    listener, address = TCP.listen()
    link.reach_at(TCP.name, address)

    async def pump(source, sink):
        try:
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def pass_on(reader, writer):
        up_reader, up_writer = await asyncio.open_connection(
            host, int(port), ssl=between and between.client
        )
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async with await asyncio.start_server(pass_on, sock=listener, ssl=between and between.server):
        yield seen


async def test_blocks_arrive_and_are_confirmed(prefill, decode):
    async with kv_link(tls_transport(prefill), receiving=tls_transport(decode)) as link:
        landed = await link.incoming(link.offer()).pull()
        assert landed.num_blocks == 6
        assert link.has_arrived()
        assert await link.next_end() is ReleaseReason.CONFIRMED
        assert link.sender.stats().strangers == 0


async def test_blocks_of_many_records_arrive(prefill, decode):
    size = 3 * 1024 * 1024 + 17
    async with kv_link(
        tls_transport(prefill), receiving=tls_transport(decode), block_bytes=size
    ) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


async def test_nothing_of_a_block_or_a_greeting_can_be_read_on_the_wire(prefill, decode):
    async with kv_link(tls_transport(prefill), receiving=tls_transport(decode)) as link:
        marks = [b"decode-0", b"p-1", bytes(link.source.block(link.blocks()[0].block_id))[:64]]
        async with relay(link, between=None) as seen:
            await link.incoming(link.offer()).pull()
    assert len(seen) > 6 * 512
    assert [mark for mark in marks if mark in seen] == []


async def test_a_certificate_of_another_authority_is_refused_on_either_side(
    prefill, decode, stranger
):
    theirs = stranger.issue("worker").contexts()
    for serving, receiving in ((theirs, decode), (prefill, theirs)):
        async with kv_link(
            tls_transport(serving), receiving=tls_transport(receiving, timings=QUICK)
        ) as link:
            with pytest.raises(NotAuthenticatedError, match="prefill-0: "):
                await link.incoming(link.offer()).pull()
            await until(lambda link=link: link.sender.stats().strangers == 1)


async def test_a_certificate_without_the_secret_is_not_enough(prefill, decode):
    other = Secret("the secret of another deployment altogether")
    async with kv_link(
        tls_transport(prefill), receiving=tls_transport(decode, secret=other)
    ) as link:
        with pytest.raises(NotAuthenticatedError, match="different secrets"):
            await link.incoming(link.offer()).pull()


async def test_who_sits_between_two_tls_connections_cannot_pass_the_proofs_on(
    authority, prefill, decode
):
    """Somebody with a certificate of the deployment, but not its secret, relays all plaintext."""
    between = authority.issue("between").contexts()
    async with kv_link(tls_transport(prefill), receiving=tls_transport(decode)) as link:
        async with relay(link, between) as seen:
            with pytest.raises(NotAuthenticatedError, match="when it had our proof"):
                await link.incoming(link.offer()).pull()
        await until(lambda: link.sender.stats().strangers == 1)
        assert len(seen) == CHALLENGE_BYTES + RESPONSE_BYTES


async def test_a_plain_receiver_gets_nothing_from_a_server_with_tls(prefill):
    async with kv_link(
        tls_transport(prefill, timings=QUICK), receiving=tcp_transport(timings=QUICK)
    ) as link:
        with pytest.raises(PeerLostError):
            await link.incoming(link.offer()).pull()
        await until(lambda: link.sender.stats().strangers == 1)


async def test_a_receiver_with_tls_asks_nothing_of_a_plain_server(decode):
    async with kv_link(
        tcp_transport(timings=QUICK), receiving=tls_transport(decode, timings=QUICK)
    ) as link:
        with pytest.raises(NotAuthenticatedError, match="no TLS"):
            await link.incoming(link.offer()).pull()


async def test_a_server_that_closes_during_tls_is_a_lost_peer(decode):
    async with kv_link(tcp_transport(), receiving=tls_transport(decode)) as link:
        listener, address = TCP.listen()

        async def close(_, writer):
            writer.close()

        async with await asyncio.start_server(close, sock=listener):
            link.reach_at(TCP.name, address)
            with pytest.raises(PeerLostError):
                await link.incoming(link.offer()).pull()


async def test_older_tls_is_refused(prefill, authority):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.check_hostname = False
    old.load_verify_locations(authority.path)
    async with kv_link(tls_transport(prefill)) as link:
        host, port = link.address.split(":")
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            await asyncio.open_connection(host, int(port), ssl=old)


@pytest.mark.parametrize("damage", [Damage.FLIP, Damage.CUT])
async def test_one_damaged_byte_fails_the_transfer(damage, prefill, decode):
    serving, receiving = tls_transport(prefill, timings=QUICK), tls_transport(decode, timings=QUICK)
    quiet = StreamTimings(keep_alive_s=100.0)  # so that nothing is counted that may not come again
    async with (
        kv_link(
            tls_transport(prefill, timings=quiet),
            receiving=tls_transport(decode, timings=quiet),
            block_bytes=32,
        ) as link,
        stream_proxy(TCP, link.address, damage, []) as (address, proxy),
    ):
        link.reach_at(TCP.name, address)
        await link.incoming(link.offer()).pull()
        await until(lambda: proxy.answered > 0)
    # Signatures differ by some bytes from one connection to the next.
    offsets = list(range(5, proxy.answered - 32, 97))
    clock = FakeClock()
    async with kv_link(
        serving, receiving=receiving, clock=clock, block_bytes=32, num_blocks=6 * len(offsets)
    ) as link:
        async with stream_proxy(TCP, link.address, damage, offsets) as (address, _):
            link.reach_at(TCP.name, address)
            transfers = [
                link.incoming(link.offer(f"{i}"), places_of(i), deadline_s=5.0)
                for i in range(len(offsets))
            ]
            for transfer in transfers:  # one by one, so that each meets its own damage
                with pytest.raises(TransferError):
                    await transfer.pull()
                await transfer.wait_quiesced()
        assert link.receiver.stats().blocks_published == 0


async def test_freed_blocks_never_leave_even_in_the_middle_of_a_send(prefill, decode):
    clock = FakeClock()
    size = 16 * 1024 * 1024
    timings = StreamTimings(keep_alive_s=100.0, silence_s=5.0)
    serving, receiving = (
        tls_transport(prefill, timings=timings),
        tls_transport(decode, timings=timings),
    )
    async with kv_link(serving, receiving=receiving, clock=clock, block_bytes=size) as link:
        key = link.open()
        block = link.blocks()[0]
        link.source.block(block.block_id)[:] = b"\x01" * size
        link.sender.grant(key, [block], FIRST)
        session = await receiving.connect(link.destination, link.peer, key, link.me)
        grants = session.grants()
        (granted,) = (await anext(grants)).blocks
        # The receiving loop takes what comes; the owner's lease ends before all of it is out.
        fetching = session.fetch([granted], {granted.logical: 0})
        landing = asyncio.create_task(anext(fetching))
        await until(lambda: session._frames.bytes_received > 64 * 1024)
        clock.advance(5.0)
        assert await link.next_end() is ReleaseReason.EXPIRED
        link.source.block(block.block_id)[:] = b"\x02" * size  # the pool's next owner
        with pytest.raises(TransferError):
            await landing
        await session.close()
        assert b"\x02" not in bytes(link.destination.block(0))


async def test_transfers_leave_no_descriptor_behind(prefill, decode):
    async with kv_link(tls_transport(prefill), receiving=tls_transport(decode)) as link:
        process = psutil.Process()
        before = None
        for number in range(20):
            await link.incoming(link.offer(f"t{number}")).pull()
            await link.next_end()
            before = before or process.num_fds()
        await until(lambda: process.num_fds() <= before)


async def test_a_peer_that_is_gone_before_tls_begins_costs_nothing(prefill, decode):
    async with kv_link(tls_transport(prefill), receiving=tls_transport(decode)) as link:
        host, port = link.address.split(":")
        gone = socket.create_connection((host, int(port)))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone.close()  # with a reset
        await link.incoming(link.offer()).pull()


def _has_ended(connection):
    try:
        connection.getpeername()
    except OSError:
        return True
    return False


async def test_a_peer_that_is_gone_before_our_tls_begins_is_lost_and_leaves_no_descriptor(decode):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    theirs.close()  # with a reset
    await until(lambda: _has_ended(ours))
    descriptor = ours.fileno()
    with pytest.raises(PeerLostError, match="connection lost"):
        LinkSecurity(secret=SECRET, tls=decode).connected(ours)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_only_inside_tls_is_the_data_path_encrypted(prefill):
    paths = [t.capabilities.data_path for t in (tcp_transport(), tls_transport(prefill))]
    assert paths == ["authenticated", "encrypted"]


def test_files_that_are_no_certificates_are_refused(authority, stranger, tmp_path):
    good = authority.issue("good")
    foreign = stranger.issue("foreign")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_bytes(os.urandom(64))
    empty = tmp_path / "empty.pem"
    empty.touch()
    for files in (
        CertificateFiles(certificate=tmp_path / "none.pem", key=good.key, ca=good.ca),
        CertificateFiles(certificate=nonsense, key=good.key, ca=good.ca),
        CertificateFiles(certificate=empty, key=good.key, ca=good.ca),
        CertificateFiles(certificate=good.certificate, key=foreign.key, ca=good.ca),
        CertificateFiles(certificate=good.certificate, key=good.key, ca=nonsense),
    ):
        with pytest.raises((OSError, ValueError)):
            files.contexts()
