"""What is particular to the torch transport: pairs that are kept, broken, made anew, given up."""

import asyncio
import dataclasses
import gc
import os
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import CorruptTransferError, PeerLostError
from kv_transfer.transports import process_group, wire
from kv_transfer.transports.device import block_tensor
from kv_transfer.transports.group_backends import (
    GlooBackend,
    NcclBackend,
    nccl_obstacle,
    refuse_one_gpu,
)
from kv_transfer.transports.group_memory import NcclMemory
from kv_transfer.transports.mirrored_store import MirroredStore
from kv_transfer.transports.pair_messages import Entry, Ready, Turn
from kv_transfer.transports.pair_table import PairLimits
from kv_transfer.transports.process_group import OWNER_RANK, RECEIVER_RANK, PairGroup
from kv_transfer.transports.torch_owner import GroupOutlet
from kv_transfer.transports.wire import FrameType
from tests.fakes.block_memory import ByteMemory
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, PLACES, POISON, kv_link, one_lot, places_of
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import QUICK, TORCH
from tests.fakes.until import turned, until

MIB = 1024 * 1024


class CountingBackend(GlooBackend):
    """Gloo that counts what is made and what is aborted."""

    def __init__(self, host="127.0.0.1"):
        super().__init__(host=host, connect_s=2.0)
        self.made = 0
        self.aborted = 0

    def make(self, store, rank):
        group = super().make(store, rank)
        self.made += 1
        return group

    def abort(self, group, peer):
        super().abort(group, peer)
        self.aborted += 1


@asynccontextmanager
async def counted_link(*, owner_limits=None, receiver_limits=None, **link):
    """A link whose receiver's end counts its groups."""
    backend = CountingBackend()
    owner = TORCH.transport(limits=owner_limits)
    receiving = TORCH.transport(limits=receiver_limits, backend=backend)
    async with kv_link(owner, receiving=receiving, **link) as made:
        yield made, backend


async def hand_off(link, name):
    await link.incoming(link.offer(name)).pull()
    assert link.has_arrived()
    assert await link.next_end() is ReleaseReason.CONFIRMED


@asynccontextmanager
async def group_pair(backend=None):
    """Both ends of a group, made over stores that mirror each other."""
    backend = backend or CountingBackend()
    stores = []

    def publish_to(rank):
        return lambda key, value: stores[rank].put(key, value)

    stores += [MirroredStore(publish_to(RECEIVER_RANK), 10.0)]
    stores += [MirroredStore(publish_to(OWNER_RANK), 10.0)]
    ends = [PairGroup(backend, rank) for rank in (OWNER_RANK, RECEIVER_RANK)]
    await asyncio.gather(*(end.make(store) for end, store in zip(ends, stores, strict=True)))
    try:
        yield ends
    finally:
        await asyncio.gather(*(end.close() for end in ends))


def blocks_of(memory):
    return [block_tensor(memory, BlockId(i)) for i in range(memory.num_blocks)]


@pytest.mark.parametrize("size", [100, 64 * 1024, 700 * 1024, MIB, 2 * MIB + 7])
async def test_blocks_of_any_size_arrive_in_their_places(size):
    source, destination = ByteMemory(9, size), ByteMemory(9, size)
    source.fill(3)
    progress = []
    async with group_pair() as (owner, receiver):
        await asyncio.gather(
            owner.send(blocks_of(source)),
            receiver.receive(blocks_of(destination), lambda *counts: progress.append(counts)),
        )
    assert all(source.block(BlockId(i)) == destination.block(BlockId(i)) for i in range(9))
    assert progress[-1][1] == 9 * size
    assert [messages for messages, _ in progress] == list(range(1, len(progress) + 1))


async def test_nothing_lands_after_a_group_was_closed():
    """The fence: a receive is posted, its group is closed, and only then the owner sends."""
    source, destination = ByteMemory(2, MIB), ByteMemory(2, MIB)
    source.fill(3)
    async with group_pair() as (owner, receiver):
        receiving = asyncio.create_task(
            receiver.receive(blocks_of(destination), lambda *counts: None)
        )
        await asyncio.sleep(0)
        await receiver.close()
        with pytest.raises(PeerLostError):
            await receiving
        sending = asyncio.create_task(owner.send(blocks_of(source)))
        await asyncio.sleep(0)
        await owner.close()  # Gloo does not always tell a sender that its peer has gone
        with pytest.raises(PeerLostError):
            await sending
        with pytest.raises(PeerLostError, match="closed"):
            await receiver.receive(blocks_of(destination), lambda *counts: None)
    assert not any(block.any() for block in blocks_of(destination))


async def test_a_group_whose_abort_fails_says_that_it_is_no_fence():
    """Whoever waits for the fence learns that there is none, rather than waiting for ever."""

    class Stubborn(CountingBackend):
        def make(self, store, rank):
            return object()

        def abort(self, group, peer):
            raise RuntimeError("it cannot be aborted")

    group = PairGroup(Stubborn(), OWNER_RANK)
    await group.make(MirroredStore(lambda key, value: None, 60.0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"INV-FENCE.*it cannot be aborted"):
            await group.close()
    with pytest.raises(PeerLostError, match="closed"):
        await group.send([])


async def test_a_group_whose_abort_hangs_is_no_fence_and_holds_nobody_up(monkeypatch):
    """As NCCL's may, which waits for the GPU, and then so does a message that is under way."""
    monkeypatch.setattr(process_group, "_ABORT_S", 0.05)
    hanging, begun, aborted = threading.Event(), threading.Event(), threading.Event()

    class Hanging(CountingBackend):
        def make(self, store, rank):
            return SimpleNamespace(recv=lambda *message: None)

        def finish(self, work, timeout):
            begun.set()
            hanging.wait()

        def abort(self, group, peer):
            hanging.wait()
            aborted.set()

    group = PairGroup(Hanging(), RECEIVER_RANK)
    await group.make(MirroredStore(lambda key, value: None, 60.0))
    blocks = blocks_of(ByteMemory(1, MIB))
    receiving = asyncio.create_task(group.receive(blocks, lambda *counts: None))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"INV-FENCE.*0.05 s have passed"):
            await group.close()
    with pytest.raises(PeerLostError, match="closed"):
        await receiving

    hanging.set()

    await until(aborted.is_set)
    with pytest.raises(RuntimeError, match="INV-FENCE"):
        await group.close()  # what was told once stays so: nothing of it was reused meanwhile


async def test_a_group_that_the_peer_does_not_make_ends_with_its_store():
    backend = CountingBackend()
    group = PairGroup(backend, OWNER_RANK)
    making = asyncio.create_task(group.make(MirroredStore(lambda key, value: None, 60.0)))
    await asyncio.sleep(0)
    await group.close()
    with pytest.raises(PeerLostError):
        await making


async def test_one_group_serves_many_transfers():
    async with counted_link() as (link, backend):
        for number in range(5):
            await hand_off(link, f"t{number}")
        assert backend.made == 1


async def test_transfers_at_once_take_turns_on_one_group():
    async with counted_link(num_blocks=6 * 12) as (link, backend):
        places = [[BlockId(6 * i + j) for j in range(6)] for i in range(12)]
        transfers = [link.incoming(link.offer(f"t{i}"), places[i]) for i in range(12)]
        await asyncio.gather(*(transfer.pull() for transfer in transfers))
        assert all(map(link.has_arrived, places))
        assert backend.made == 1


async def test_a_failure_in_a_turn_costs_its_group_and_no_more(monkeypatch):
    async with counted_link() as (link, backend):
        await hand_off(link, "before")
        frame = GroupOutlet.frame

        def wrong(self, identity, block):
            other = dataclasses.replace(block, generation=block.generation + 1)
            return frame(self, identity, other)

        with monkeypatch.context() as patched:
            patched.setattr(GroupOutlet, "frame", wrong)
            transfer = link.incoming(link.offer("bad"))
            with pytest.raises(CorruptTransferError, match="generation"):
                await transfer.pull()
            await transfer.wait_quiesced()
        assert await link.next_end() is ReleaseReason.PEER_LOST
        assert backend.aborted == 1
        await hand_off(link, "after")
        assert backend.made == 2


async def test_bytes_that_differ_from_the_digest_do_not_land(monkeypatch):
    """Also what a stranger has sent into the sockets of the group."""
    async with counted_link() as (link, _):

        def wrong(self, identity, block):
            content = memoryview(bytes(512))
            return (wire.block_header(identity, FrameType.LOCATED, block, content),)

        monkeypatch.setattr(GroupOutlet, "frame", wrong)
        transfer = link.incoming(link.offer())
        with pytest.raises(CorruptTransferError, match="digest"):
            await transfer.pull()
        await transfer.wait_quiesced()
        assert link.receiver.stats().blocks_published == 0


async def test_a_group_that_the_owner_gave_up_is_made_anew_within_the_transfer():
    """Eviction and idleness on one side are no failure of a transfer on the other."""
    async with counted_link(owner_limits=PairLimits(idle_s=0.0)) as (link, backend):
        for number in range(3):
            await hand_off(link, f"t{number}")
        assert backend.made > 1
        assert link.receiver.stats().by_outcome == {"landed": 3}


async def test_fifty_pairs_leave_no_thread_no_descriptor_and_no_group_behind():
    """F49, F50: every transfer finds the group of the one before broken."""
    limits = PairLimits(idle_s=0.0)
    async with counted_link(receiver_limits=limits, owner_limits=limits) as (link, backend):
        process = psutil.Process()

        def held():
            gc.collect()
            return process.num_fds(), threading.active_count(), process.num_threads()

        await hand_off(link, "warm")
        await until(lambda: backend.aborted == backend.made)
        before = held()
        while backend.made < 50:
            await hand_off(link, f"t{backend.made}-{len(link.ended)}")
        await until(lambda: backend.aborted == backend.made)
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


async def test_every_listener_of_both_ends_is_on_the_configured_interface():
    def listening():
        connections = psutil.Process().net_connections("inet")
        return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    transport = TORCH.transport(host="127.0.0.2", timings=QUICK)
    async with kv_link(transport) as link:
        await hand_off(link, "t")
        opened = listening() - before
        assert len(opened) >= 2  # control, and at least one for groups
        assert {address.ip for address in opened} == {"127.0.0.2"}


async def answer_to(peer, kind):
    while True:
        header, payload = await peer.hear()
        if header.kind is kind:
            return payload
        assert header.kind is not FrameType.ERROR, wire.unpack_error(payload)


async def test_an_owner_without_the_group_says_so():
    async with kv_link(TORCH.transport(timings=QUICK)) as link:
        key = link.offer()
        async with RawPeer(TORCH, link.address, key) as peer:
            await peer.greet(key, link.me)
            for _ in range(2):  # and nothing is left of the first turn
                await peer.say(FrameType.TURN, Turn(epoch=7, is_new=False).pack())
                answer = Ready.unpack(await answer_to(peer, FrameType.READY))
                assert answer == Ready(epoch=7, is_paired=False)


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([(FrameType.FETCH, None)], "without a turn"),
        ([(FrameType.TURN, b"?")], "expected"),
        ([(FrameType.TURN, Turn(epoch=1, is_new=True).pack())] * 2, "turn within a turn"),
        ([(FrameType.RENDEZVOUS, Entry(epoch=1, key="k", value=b"").pack())], "no group of"),
        (
            [
                (FrameType.TURN, Turn(epoch=1, is_new=True).pack()),
                (FrameType.RENDEZVOUS, Entry(epoch=1, key="k", value=bytes(70_000)).pack()),
            ],
            "bytes for the store",
        ),
        ([(FrameType.READY, Ready(epoch=1, is_paired=True).pack())], "a receiver sent READY"),
    ],
)
async def test_a_receiver_that_breaks_the_order_of_turns_ends_its_transfer_alone(frames, error):
    async with kv_link(TORCH.transport(timings=QUICK)) as link:
        bad, good = link.offer("bad"), link.offer("good")
        async with RawPeer(TORCH, link.address, bad) as rogue:
            await rogue.greet(bad, link.me)
            for kind, payload in frames:
                blocks = wire.pack_blocks(link.blocks()[:1])
                await rogue.say(kind, blocks if payload is None else payload)
            refusal = await rogue.hear_error()
            assert isinstance(refusal, CorruptTransferError)
            assert error in str(refusal)
        await link.incoming(good).pull()


async def test_a_turn_of_an_earlier_epoch_does_not_cost_the_pair_its_group():
    """It was asked for by a transfer that has ended since."""
    async with counted_link() as (link, backend):
        await hand_off(link, "first")
        late = link.offer("late")
        async with RawPeer(TORCH, link.address, late) as peer:
            await peer.greet(late, link.me)
            await peer.say(FrameType.TURN, Turn(epoch=1, is_new=True).pack())
            assert "comes after" in str(await peer.hear_error())
        assert await link.next_end() is ReleaseReason.PEER_LOST
        await hand_off(link, "second")
        assert backend.made == 1


async def test_a_receiver_that_makes_no_group_delays_no_other_and_ends_with_its_lease():
    clock = FakeClock()
    async with kv_link(TORCH.transport(timings=QUICK), clock=clock) as link:
        slow, good = link.offer("slow"), link.offer("good")
        stranger = dataclasses.replace(link.me, incarnation="d-2")
        slow = dataclasses.replace(slow, transfer_id="of another", decode_incarnation="d-2")
        link.sender.open(slow, stranger)
        async with RawPeer(TORCH, link.address, slow) as sleeper:
            await sleeper.greet(slow, stranger)
            await sleeper.say(FrameType.TURN, Turn(epoch=1, is_new=True).pack())
            await answer_to(sleeper, FrameType.READY)  # and it never makes its end
            await link.incoming(good).pull()
            assert link.has_arrived()
            clock.advance(5.0)
            await until(lambda: (slow, ReleaseReason.EXPIRED) in link.ended)
            assert await sleeper.is_dropped()


async def test_a_transfer_that_is_cancelled_in_its_turn_leaves_the_next_one_a_way():
    async with counted_link(block_bytes=4 * MIB) as (link, _):
        for number in range(4):
            key = link.open(f"c{number}")
            assert link.sender.grant(key, link.blocks()[:5], None)
            transfer = link.incoming(key)
            pulling = asyncio.create_task(transfer.pull())
            link.destination.block(PLACES[0])[:64] = bytes(64)
            await until(lambda: any(link.destination.block(PLACES[0])[:64]))
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            await transfer.wait_quiesced()
        key = link.open("last")
        assert link.sender.grant(key, link.blocks(), FIRST)
        await link.incoming(key).pull()
        assert link.has_arrived()


async def test_scratch_of_a_turn_that_is_cut_short_is_lent_when_its_group_is_aborted(monkeypatch):
    """Until then what the owner still sends may be written there."""

    class Held(CountingBackend):
        may_abort, is_aborting = threading.Event(), threading.Event()

        def abort(self, group, peer):
            self.is_aborting.set()
            assert self.may_abort.wait(20)
            super().abort(group, peer)

    send, begun, is_stuck = PairGroup.send, threading.Event(), threading.Event()

    async def send_late(group, blocks):
        begun.set()
        if is_stuck.is_set():
            await asyncio.Event().wait()  # it is ended with the connection
        await send(group, blocks)

    monkeypatch.setattr(PairGroup, "send", send_late)
    backend = Held()
    receiving = TORCH.transport(backend=backend)
    async with kv_link(
        TORCH.transport(), receiving=receiving, own_size=8, scratch=one_lot()
    ) as link:
        is_stuck.set()
        transfer = link.incoming(link.offer("first"), places_of(0))
        pulling = asyncio.create_task(transfer.pull())
        await until(begun.is_set)
        pulling.cancel()
        await until(backend.is_aborting.is_set)
        assert link.arena.free_lots == 0  # and not because the next one has it
        is_stuck.clear()
        waiting = asyncio.create_task(link.incoming(link.offer("second"), places_of(1)).pull())
        await until(lambda: link.receiver.stats().active == 2)
        await turned(link.receiver._thread, link.sender._thread)
        assert link.arena.free_lots == 0
        for block_id in range(link.arena.memory.num_blocks):
            block = link.arena.memory.block(BlockId(block_id))
            assert not any(block)  # nobody has fetched into it
            block[:] = bytes([POISON]) * block.nbytes

        backend.may_abort.set()

        await waiting
        assert link.has_arrived(places_of(1))
        await transfer.wait_quiesced()
        assert link.arena.free_lots == 1


def test_nccl_is_refused_with_the_reason():
    if nccl_obstacle() is None:
        pytest.skip("NCCL can be used here")
    with pytest.raises(RuntimeError, match=r"no NCCL|no GPU"):
        NcclBackend(device=0, connect_s=1.0, interface="lo")


class PretendNccl:
    """`ProcessGroupNCCL` as torch's stub has it, as far as making a group goes."""

    class Options:
        def __init__(self):
            self.config = SimpleNamespace(max_ctas=32)

    def __init__(self, store, rank, size, options):
        self.options = options
        self.connected = None

    def eager_connect_single_device(self, device):
        self.connected = device


@pytest.fixture
def nccl_is_there(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize(("before", "after"), [(None, "=eth7"), ("ib0", "ib0")])
def test_nccl_is_told_its_interface_unless_the_environment_says_another(
    before, after, nccl_is_there, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", before or "")  # for monkeypatch to put back
    if before is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")

    NcclBackend(device=0, connect_s=1.0, interface="eth7")

    assert os.environ["NCCL_SOCKET_IFNAME"] == after


def test_a_group_of_nccl_has_no_more_channels_than_its_memory_is_counted_for(
    nccl_is_there, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a")
    )
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", PretendNccl, raising=False)
    store = torch.distributed.HashStore()
    store.set("gpu/1", "GPU-b")

    backend = NcclBackend(device=0, connect_s=1.0, interface="lo")
    group = backend.make(store, OWNER_RANK)

    assert group.options.config.max_ctas == NcclMemory.of({}).channels
    assert group.connected == torch.device("cuda", 0)


def test_two_ranks_on_one_gpu_are_refused_with_the_way_out():
    refuse_one_gpu("GPU-a", "GPU-b")
    with pytest.raises(RuntimeError, match="cuda_ipc is the way"):
        refuse_one_gpu("GPU-a", "GPU-a")
