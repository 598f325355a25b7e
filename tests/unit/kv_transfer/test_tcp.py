"""What only the tcp transport must do, on loopback sockets, both ends in this process."""

import os
import socket

import psutil
import pytest

from kv_transfer.handoff import ReleaseReason
from kv_transfer.transports import wire
from kv_transfer.transports.stream_server import StreamTimings
from kv_transfer.transports.wire import HEADER_BYTES, FrameType
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, kv_link
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import TCP, tcp_transport


def listening() -> set[tuple[str, int]]:
    """Of this process."""
    return {
        (c.laddr.ip, c.laddr.port)
        for c in psutil.Process(os.getpid()).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }


async def test_only_the_configured_host_listens_and_a_receiver_does_not():
    before = listening()  # a process group of an earlier test may still be waiting for its end
    async with kv_link(tcp_transport()) as link:
        port = int(link.address.rpartition(":")[2])
        assert listening() - before == {("127.0.0.1", port)}


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_an_ipv6_address_works():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    async with kv_link(tcp_transport(host="::1")) as link:
        await link.incoming(link.offer()).pull()
        assert link.has_arrived()


async def test_freed_blocks_never_leave_even_in_the_middle_of_a_send():
    """What was sent before the lease ended is the old block; nothing of the new one follows."""
    clock = FakeClock()
    size = 16 * 1024 * 1024  # more than the socket buffers hold
    timings = StreamTimings(keep_alive_s=100.0)  # so that nothing but the send itself can notice
    async with kv_link(tcp_transport(timings=timings), clock=clock, block_bytes=size) as link:
        key = link.open()
        block = link.blocks()[0]
        link.source.block(block.block_id)[:] = b"\x01" * size
        link.sender.grant(key, [block], FIRST)
        async with RawPeer(TCP, link.address, key) as slow:
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
