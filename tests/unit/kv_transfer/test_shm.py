"""What only the shm transport must do: who may connect, what is mapped, and for how long."""

import asyncio
import dataclasses
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.transport import CorruptTransferError, LinkRefusedError, PeerLostError
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Identity
from tests.fakes.block_memory import ByteMemory, peer_info
from tests.fakes.kv_link import kv_link
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import QUICK, SECRET, SHM, shm_transport
from tests.fakes.until import until


def arenas_mapped():
    """Read-only mappings of shared regions in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:baton-kv" in line and " r--s " in line for line in lines)


async def hand_over(link, name="t"):
    await link.incoming(link.offer(name)).pull()
    assert link.has_arrived()


async def test_nothing_listens_on_a_network():
    async with kv_link(shm_transport()) as link:
        assert link.address.startswith("@")
        await hand_over(link)


async def test_an_arena_is_mapped_once_and_until_the_receiver_closes():
    assert arenas_mapped() == 0
    async with kv_link(shm_transport()) as link:
        for number in range(3):
            await hand_over(link, f"t{number}")
        assert arenas_mapped() == 1
    assert arenas_mapped() == 0


async def test_sessions_that_meet_a_new_peer_at_once_share_one_mapping():
    """F12: what is kept of a peer is made once, whoever comes first."""
    transport = shm_transport()
    async with kv_link(transport) as link:
        keys = [link.offer(f"t{number}") for number in range(8)]
        sessions = await asyncio.gather(
            *(transport.connect(link.destination, link.peer, key, link.me) for key in keys)
        )
        assert arenas_mapped() == 1
        for session in sessions:
            await session.close()
        await transport.close()
        assert arenas_mapped() == 0


async def test_a_worker_that_came_back_is_read_through_a_mapping_of_its_own():
    transport = shm_transport()
    async with kv_link(transport) as link:
        await hand_over(link)
        async with kv_link(shm_transport(), receiving=transport, prefill="p-2") as restarted:
            restarted.source.fill(seed=2)
            await hand_over(restarted)
            assert arenas_mapped() == 1


async def test_a_mapping_in_use_outlives_the_news_that_its_worker_came_back():
    transport = shm_transport()
    async with kv_link(transport) as link:
        key = link.open()
        session = await transport.connect(link.destination, link.peer, key, link.me)
        async with kv_link(shm_transport(), receiving=transport, prefill="p-2") as restarted:
            session_of_new = await transport.connect(
                restarted.destination, restarted.peer, restarted.open(), restarted.me
            )
            assert arenas_mapped() == 2
            await session.close()
            assert arenas_mapped() == 1
            await session_of_new.close()


async def test_a_process_whose_end_cannot_be_seen_is_mapped_for_one_session_at_a_time(monkeypatch):
    def refuse(_):
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    async with kv_link(shm_transport()) as link:
        await hand_over(link)
        await until(lambda: arenas_mapped() == 0)
        await hand_over(link, "u")


async def test_another_users_receiver_is_not_served(monkeypatch):
    async with kv_link(shm_transport(timings=QUICK)) as link:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        async with RawPeer(SHM, link.address) as stranger:
            assert await stranger.is_dropped()


async def test_another_users_server_is_not_asked(monkeypatch):
    async with kv_link(shm_transport(timings=QUICK)) as link:
        key, me = link.offer(), os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(LinkRefusedError, match=f"is user {me}'s, not {me + 1}'s"):
            await link.incoming(key).pull()


async def welcome(frames, key, descriptor):
    """Answer a greeting, with a descriptor or without."""
    await LinkSecurity(secret=SECRET).admit(frames, peer_info("p", "p-1", bytes_per_block=512))
    header = bytearray(HEADER_BYTES)
    await frames.receive_into(memoryview(header))
    await frames.receive_into(memoryview(bytearray(wire.parse_header(header).length)))
    owner = peer_info("prefill-0", "p-1", bytes_per_block=512)
    frame = wire.control_frame(Identity.of(key), FrameType.WELCOME, wire.pack_welcome(owner))
    await frames.send([frame], descriptor=descriptor)
    await frames.receive_into(memoryview(bytearray(1 << 20)))


@pytest.mark.parametrize(
    ("has_descriptor", "error", "why"),
    [
        (False, CorruptTransferError, "no descriptor came"),
        (True, LinkRefusedError, "cannot map the arena of prefill-0"),
    ],
)
async def test_a_welcome_without_sealed_memory_is_refused(has_descriptor, error, why):
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    listener, address = SHM.listen()
    listener.setblocking(False)

    async def serve(key):
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        frames = FrameSocket(accepted)
        try:
            await welcome(frames, key, unsealed if has_descriptor else None)
        finally:
            frames.close()

    async with kv_link(shm_transport(timings=QUICK)) as link:
        link.peer = dataclasses.replace(link.peer, endpoints=(("shm", address),))
        key = link.open()
        serving = asyncio.create_task(serve(key))
        with pytest.raises(error, match=why):
            await link.incoming(key).pull()
        await asyncio.wait({serving})
        assert isinstance(serving.exception(), PeerLostError)  # the receiver has closed
    listener.close()
    os.close(unsealed)


async def test_a_block_outside_the_arena_is_corrupt():
    transport = shm_transport()
    async with kv_link(transport) as link:
        key = link.open()
        session = await transport.connect(link.destination, link.peer, key, link.me)
        inside = link.blocks()[0]
        outside = dataclasses.replace(inside, block_id=len(link.source.generations))
        # The owner's check of the request is in the way of the test; the session's own is meant.
        landing = SimpleNamespace(block=outside, place=BlockId(0))
        with pytest.raises(CorruptTransferError, match="outside the arena"):
            await session._source.fill(session._frames, landing)
        await session.close()


async def test_a_full_backlog_is_waited_for():
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0baton-test-backlog-" + str(os.getpid()))
        listener.listen(0)
        address = "@baton-test-backlog-" + str(os.getpid())
        first = SHM.connect(address)  # fills the backlog
        async with kv_link(shm_transport(timings=QUICK)) as link:
            link.peer = dataclasses.replace(link.peer, endpoints=(("shm", address),))
            with pytest.raises(PeerLostError, match="no answer"):
                await link.incoming(link.offer()).pull()
        first.close()


def test_memory_that_is_not_shared_cannot_be_served():
    with pytest.raises(ValueError, match="no region"):
        shm_transport().server(
            ByteMemory(4, 512), object(), peer_info("p", "p-1", bytes_per_block=512)
        )
