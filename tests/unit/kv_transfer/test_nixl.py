"""What only the nixl transport must do: agents, the links that own them, and their ends."""

import asyncio
import mmap
import threading
import time
import weakref

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.transport import CorruptTransferError, LinkRefusedError, PeerLostError
from kv_transfer.transports import nixl_agent
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.nixl_agent import (
    NixlAgent,
    NixlMissingError,
    Read,
    ReadState,
    RemotePool,
    has_nixl,
    nixl_problem,
)
from kv_transfer.transports.nixl_link import NixlLink, NixlLinks
from tests.fakes.block_memory import ByteMemory, peer_info
from tests.fakes.kv_link import FIRST, PLACES, SOURCE, kv_link, one_lot, places_of
from tests.fakes.stream_kinds import NIXL, NIXL_TCP, QUICK, needs_nixl, nixl_transport
from tests.fakes.until import until

LOOPBACK = {"NET_DEVICES": "lo"}
PEER = peer_info("prefill-0", "p-1", bytes_per_block=512)
ME = peer_info("decode-0", "d-1", bytes_per_block=512)


def remote_pool(metadata=b"theirs", num_blocks=4):
    return RemotePool(
        metadata=metadata, address=1 << 20, num_blocks=num_blocks, bytes_per_block=512
    )


class StubbornAgent:
    """READs stay as they are until a test says otherwise."""

    def __init__(self, *, knows_peers=True):
        self.reads = []
        self.has_ended = False
        self.knows_peers = knows_peers

    def add(self, metadata):
        if not self.knows_peers:
            raise ValueError("not the metadata of an agent")
        return "them"

    def read(self, peer, remote, local):
        self.reads.append(Read(object(), ReadState.RUNNING))
        return self.reads[-1]

    def progress(self, read):
        return read.state

    def close(self):
        self.has_ended = True


def begin(link, memory, block_id=0):
    """A READ on the link, and what is told of its end."""
    ends = []
    read = link.read([(BlockId(block_id), memory.block(BlockId(0)))], ends.append)
    return read, ends


async def test_a_read_that_is_done_is_told_without_an_error():
    agent, memory = StubbornAgent(), ByteMemory(1, 512)
    link = NixlLink(agent, PEER, remote_pool(), stall_s=10.0)
    read, ends = begin(link, memory)
    read.state = ReadState.DONE
    await until(lambda: ends == [None])
    await link.settle([read], 0.0)
    assert not agent.has_ended


async def test_reads_that_follow_each_other_at_once_are_all_watched():
    agent, memory = StubbornAgent(), ByteMemory(1, 512)
    link = NixlLink(agent, PEER, remote_pool(), stall_s=10.0)
    for _ in range(5):
        done = asyncio.Event()
        read = link.read([(BlockId(0), memory.block(BlockId(0)))], lambda _, done=done: done.set())
        read.state = ReadState.DONE
        await done.wait()


async def test_a_link_whose_reads_do_not_move_fails_them_and_ends_its_agent_for_the_fence():
    agent, memory = StubbornAgent(), ByteMemory(1, 512)
    link = NixlLink(agent, PEER, remote_pool(), stall_s=0.01)
    read, ends = begin(link, memory)
    await until(lambda: len(ends) == 1)
    assert isinstance(ends[0], PeerLostError)
    assert not agent.has_ended  # nobody has asked for the fence
    await link.settle([read], 0.0)
    assert agent.has_ended
    assert len(ends) == 1


async def test_a_failed_read_is_no_fence():
    """Other parts of it may still be written."""
    agent, memory = StubbornAgent(), ByteMemory(1, 512)
    link = NixlLink(agent, PEER, remote_pool(), stall_s=10.0)
    read, ends = begin(link, memory)
    read.state = ReadState.FAILED
    await until(lambda: len(ends) == 1)
    assert isinstance(ends[0], PeerLostError)
    assert link.is_broken
    await link.settle([read], 60.0)
    assert agent.has_ended


async def test_the_end_of_an_agent_fails_the_other_reads_of_its_peer_and_begins_none():
    agent, memory = StubbornAgent(), ByteMemory(1, 512)
    link = NixlLink(agent, PEER, remote_pool(), stall_s=10.0)
    stuck, _ = begin(link, memory)
    _, others_ends = begin(link, memory)
    await link.settle([stuck], 0.0)
    assert [type(end) for end in others_ends] == [PeerLostError]
    read, ends = begin(link, memory)
    assert read is None
    assert [type(end) for end in ends] == [PeerLostError]
    assert len(agent.reads) == 2


def test_a_peer_that_sends_no_agents_metadata_is_refused():
    with pytest.raises(LinkRefusedError, match="prefill-0: not the metadata"):
        NixlLink(StubbornAgent(knows_peers=False), PEER, remote_pool(), stall_s=1.0)


@pytest.mark.parametrize("block_id", [4, 5000])
def test_a_block_outside_the_peers_pool_is_corrupt(block_id):
    link = NixlLink(StubbornAgent(), PEER, remote_pool(), stall_s=1.0)
    link.check(BlockId(3))
    with pytest.raises(CorruptTransferError, match="outside prefill-0's 4"):
        link.check(BlockId(block_id))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("no_such_package",))
    assert not has_nixl()
    with pytest.raises(NixlMissingError, match=r"pip install 'baton-serve\[rdma\]'"):
        nixl_transport()


def test_a_package_that_is_there_and_does_not_load_is_no_crash(monkeypatch, tmp_path):
    package = tmp_path / "package_that_does_not_load"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_api.py").write_text("raise ImportError('libucp.so.0: no such file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl_agent, "_PACKAGES", (package.name,))
    assert has_nixl()
    assert "is installed and does not load: libucp.so.0" in nixl_problem()
    with pytest.raises(NixlMissingError, match=r"does not load: libucp\.so\.0"):
        nixl_transport()


@needs_nixl
def test_a_package_that_loads_has_no_problem():
    assert nixl_problem() == ""


@needs_nixl
def test_a_device_that_is_not_there_is_refused_at_the_start():
    transport = NIXL.transport(ucx_options={"NET_DEVICES": "no-such-device"})
    with pytest.raises(OSError, match="no-such-device"):
        transport.try_start()
    nixl_transport().try_start()


@needs_nixl
def test_an_agent_that_is_still_referred_to_is_no_fence():
    agent = NixlAgent("a", ByteMemory(2, 4096), LOOPBACK)
    kept = agent._agent.agent
    with pytest.raises(RuntimeError, match="INV-FENCE"):
        agent.close()
    with pytest.raises(RuntimeError, match="INV-FENCE"):
        agent.close()
    ended = weakref.ref(kept)
    del kept
    agent.close()
    assert ended() is None


class MappedMemory:
    """A pool that can be unmapped, if nobody holds it."""

    bytes_per_block, num_blocks, region = 4096, 4, None

    def __init__(self):
        self.mapping = mmap.mmap(-1, self.bytes_per_block * self.num_blocks)

    def block(self, block_id):
        start = block_id * self.bytes_per_block
        return memoryview(self.mapping)[start : start + self.bytes_per_block]


@needs_nixl
def test_memory_cannot_be_unmapped_under_an_agent():
    memory = MappedMemory()
    agent = NixlAgent("a", memory, LOOPBACK)
    with pytest.raises(BufferError):
        memory.mapping.close()
    agent.close()
    memory.mapping.close()


@needs_nixl
def test_blocks_that_do_not_lie_side_by_side_are_refused():
    memory = ByteMemory(4, 4096)
    places = [memory.block(BlockId(i)) for i in (0, 2, 1, 3, 3)]

    class Scattered(MappedMemory):
        def block(self, block_id):
            return places[2 if block_id == 3 else block_id]

    with pytest.raises(ValueError, match="side by side"):
        NixlAgent("a", Scattered(), LOOPBACK)


@needs_nixl
async def test_what_is_no_metadata_is_refused_by_a_real_agent():
    links = NixlLinks(LOOPBACK, stall_s=1.0, keep_s=60.0)
    with pytest.raises(LinkRefusedError, match="prefill-0"):
        await links.enter(ME, PEER, remote_pool(b"garbage"), ByteMemory(2, 512))
    await links.close()


@needs_nixl
async def test_a_link_is_shared_kept_for_a_while_and_then_ended():
    owner, memory = NixlAgent("owner", ByteMemory(4, 512), LOOPBACK), ByteMemory(2, 512)
    links = NixlLinks(LOOPBACK, stall_s=1.0, keep_s=0.05)
    remote = remote_pool(owner.metadata())
    both = await asyncio.gather(*(links.enter(ME, PEER, remote, memory) for _ in range(2)))
    assert both[0] is both[1]
    links.leave(both[0], peer_is_lost=False)
    links.leave(both[1], peer_is_lost=False)
    assert await links.enter(ME, PEER, remote, memory) is both[0]
    links.leave(both[0], peer_is_lost=False)
    await until(lambda: both[0].is_ended)
    another = await links.enter(ME, PEER, remote, memory)
    assert another is not both[0]
    links.leave(another, peer_is_lost=False)
    await links.close()
    assert another.is_ended
    owner.close()


@needs_nixl
async def test_the_last_session_that_has_lost_its_peer_leaves_no_agent_for_it():
    owner, memory = NixlAgent("owner", ByteMemory(4, 512), LOOPBACK), ByteMemory(2, 512)
    links = NixlLinks(LOOPBACK, stall_s=1.0, keep_s=60.0)
    remote = remote_pool(owner.metadata())
    link, same = [await links.enter(ME, PEER, remote, memory) for _ in range(2)]
    links.leave(link, peer_is_lost=True)
    assert not same.is_ended
    links.leave(same, peer_is_lost=True)
    assert same.is_ended
    assert await links.enter(ME, PEER, remote, memory) is not same
    await links.close()
    owner.close()


@needs_nixl
async def test_a_worker_that_came_back_has_a_link_of_its_own():
    owner, memory = NixlAgent("owner", ByteMemory(4, 512), LOOPBACK), ByteMemory(2, 512)
    links = NixlLinks(LOOPBACK, stall_s=1.0, keep_s=60.0)
    remote = remote_pool(owner.metadata())
    unused = await links.enter(ME, PEER, remote, memory)
    links.leave(unused, peer_is_lost=False)
    restarted = peer_info("prefill-0", "p-2", bytes_per_block=512)
    link = await links.enter(ME, restarted, remote, memory)
    assert unused.is_ended
    assert not link.is_ended
    links.leave(link, peer_is_lost=False)
    await links.close()
    owner.close()


@needs_nixl
async def test_a_link_that_nobody_waited_for_in_the_end_is_ended_like_an_unused_one(monkeypatch):
    ended = []
    close = NixlLink.end
    monkeypatch.setattr(NixlLink, "end", lambda link, why: (close(link, why), ended.append(why)))
    owner, memory = NixlAgent("owner", ByteMemory(4, 512), LOOPBACK), ByteMemory(2, 512)
    links = NixlLinks(LOOPBACK, stall_s=1.0, keep_s=0.0)
    entering = asyncio.create_task(links.enter(ME, PEER, remote_pool(owner.metadata()), memory))
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    await until(lambda: ended == ["unused for long"])
    await links.close()
    owner.close()


@needs_nixl
async def test_polling_that_ends_by_our_own_fault_lets_no_transfer_wait_for_its_reads(monkeypatch):
    def fail(_):
        raise KeyError("a bug")

    monkeypatch.setattr(NixlAgent, "poll", fail)
    async with kv_link(nixl_transport()) as link:
        for name in ("first", "second"):
            with pytest.raises(PeerLostError, match="a bug"):
                await link.incoming(link.open(name)).pull()


@needs_nixl
async def test_an_agent_that_fails_to_do_its_work_ends_its_transfers_and_serves_the_next(
    monkeypatch, caplog
):
    """Over TCP no READ moves without it, so that a silent end would stop all of them."""
    poll, is_failing = NixlAgent.poll, threading.Event()

    def poll_or_fail(agent):
        if is_failing.is_set():
            raise OSError("the agent failed")
        poll(agent)

    monkeypatch.setattr(NixlAgent, "poll", poll_or_fail)
    async with kv_link(NIXL_TCP.transport()) as link:
        key = link.open("under way")
        assert link.sender.grant(key, link.blocks()[:1], None)
        pulling = asyncio.create_task(link.incoming(key).pull())
        source, place = link.source.block(SOURCE[0]), link.destination.block(PLACES[0])
        await until(lambda: place == source)
        is_failing.set()
        with pytest.raises(PeerLostError, match="the agent failed"):
            await pulling
        is_failing.clear()
        await link.incoming(link.offer("next")).pull()
        assert link.has_arrived()
    assert caplog.text.count("agent failed name=") == 1


@needs_nixl
async def test_directions_that_are_too_short_are_corrupt(monkeypatch):
    async with kv_link(nixl_transport()) as link:
        monkeypatch.setattr("kv_transfer.transports.nixl.NixlAgent.metadata", lambda _: b"")
    async with kv_link(nixl_transport()) as link:
        with pytest.raises(CorruptTransferError, match="directions of 12 bytes"):
            await link.incoming(link.offer()).pull()


@needs_nixl
async def test_reads_that_take_longer_than_silence_may_are_waited_for_while_their_window_is_full(
    monkeypatch,
):
    """No frame is read meanwhile, which says nothing about the peer: only READs that stall do."""
    begun = {}
    begin_read = NixlAgent.read

    def read_slowly(agent, peer, remote, local):
        read = begin_read(agent, peer, remote, local)
        begun[read] = time.monotonic()
        read.state = ReadState.RUNNING
        return read

    def progress(agent, read):
        if time.monotonic() - begun[read] > 2 * QUICK.silence_s:
            read.state = ReadState.DONE
        return read.state

    monkeypatch.setattr(NixlAgent, "read", read_slowly)
    monkeypatch.setattr(NixlAgent, "progress", progress)
    async with kv_link(nixl_transport(timings=QUICK), block_bytes=1 << 20) as link:
        key = link.open()
        assert link.sender.grant(key, link.blocks(), FIRST)
        await link.incoming(key).pull()
        assert link.has_arrived()
        assert len(begun) > 4


@needs_nixl
async def test_repacked_transfers_share_one_agent_of_each_peer(monkeypatch):
    """Scratch is registered with it once, whichever part of it a transfer is lent."""
    begun = []
    begin = NixlAgent.__init__

    def note(agent, name, memory, options):
        begun.append(memory)
        begin(agent, name, memory, options)

    async with kv_link(nixl_transport(), own_size=8, num_blocks=18) as link:
        monkeypatch.setattr(NixlAgent, "__init__", note)
        transfers = [link.incoming(link.offer(f"t{i}"), places_of(i)) for i in range(3)]
        await asyncio.gather(*(transfer.pull() for transfer in transfers))
        assert all(link.has_arrived(places_of(i)) for i in range(3))
        assert begun == [link.arena.memory]


@needs_nixl
async def test_scratch_that_a_read_may_still_write_to_is_lent_when_its_agent_has_ended(monkeypatch):
    events, is_stuck = [], threading.Event()
    begin_read, progress, end = NixlAgent.read, NixlAgent.progress, NixlAgent.close

    def read(agent, peer, remote, local):
        events.append("read")
        begun = begin_read(agent, peer, remote, local)
        if is_stuck.is_set():
            begun.state = ReadState.RUNNING
        return begun

    def stay(agent, read):
        return read.state if is_stuck.is_set() else progress(agent, read)

    def close(agent):
        events.append("ended")
        end(agent)

    monkeypatch.setattr(NixlAgent, "read", read)
    monkeypatch.setattr(NixlAgent, "progress", stay)
    async with kv_link(nixl_transport(), own_size=8, scratch=one_lot()) as link:
        monkeypatch.setattr(NixlAgent, "close", close)
        is_stuck.set()
        transfer = link.incoming(link.offer("first"), places_of(0))
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: events == ["read"])
        waiting = asyncio.create_task(link.incoming(link.offer("second"), places_of(1)).pull())
        await until(lambda: link.receiver.stats().active == 2)

        pulling.cancel()

        with pytest.raises(PeerLostError, match="the link has ended"):
            await waiting  # of the same agent, and without a READ before its end
        await transfer.wait_quiesced()
        assert events == ["read", "ended"]
        is_stuck.clear()
        await link.incoming(link.offer("third"), places_of(1)).pull()
        assert link.has_arrived(places_of(1))


def test_its_fence_is_not_the_closed_connection():
    assert NixlTransport.capabilities.fence == "on_agent_restart"
