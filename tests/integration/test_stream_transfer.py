"""Hand-offs between two real processes, one of which is killed, stopped or told to misbehave."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.scratch import ScratchArenas
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
)
from kv_transfer.transports.wire import FrameType
from tests.fakes.kv_processes import (
    MARK,
    NUM_BLOCKS,
    QUICK,
    Decode,
    owner_process,
    shuffled_handoff,
)
from tests.fakes.stream_kinds import NIXL_TCP, SHM, kind_parameters
from tests.fakes.stream_proxy import Damage, stream_proxy
from tests.fakes.until import until


@pytest.fixture(params=kind_parameters())
def kind(request):
    return request.param


def arenas_mapped() -> list[str]:
    """Read-only mappings of other processes' arenas in this one."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "memfd:baton-kv" in line]


async def test_blocks_arrive_whole_and_the_owner_may_free_them(kind):
    async with owner_process(kind, 64 * 1024) as owner, Decode(kind, 64 * 1024) as decode:
        for number in range(5):
            await shuffled_handoff(owner, decode, f"t{number}", seed=number)
        await until(lambda: len(owner.ended) == 5)
        assert set(map(tuple, owner.ended.values())) == {("confirmed",)}
        listening = (await owner.ask("stats"))["listening"]
        assert set(listening) == (set() if kind is SHM else {"127.0.0.1"})


async def test_a_killed_owner_is_lost_at_once_and_another_one_serves(kind):
    size = 1024 * 1024
    async with owner_process(kind, size) as owner, Decode(kind, size) as decode:
        key = decode.key(owner, "t")
        blocks = list(range(NUM_BLOCKS))
        await owner.offer(key, decode.me, [blocks[:60], []])
        transfer = decode.incoming(owner, key, blocks)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: decode.has_begun(0))
        owner.signal(signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"(?i)connection|a read failed"):  # not by silence
            await pulling
        await transfer.wait_quiesced()
        async with owner_process(kind, size, name="p2") as other:
            await shuffled_handoff(other, decode, "u", seed=1)


async def test_memory_of_an_owner_that_died_is_given_back_at_once():
    """Also where no transfer is under way that would notice its death."""
    others = set(arenas_mapped())  # a test that failed before this one keeps its own
    async with Decode(SHM, 4096) as decode:
        async with owner_process(SHM, 4096) as owner:
            await shuffled_handoff(owner, decode, "t", seed=1)
            assert len(set(arenas_mapped()) - others) == 1
            owner.signal(signal.SIGKILL)
            await until(lambda: set(arenas_mapped()) <= others)
        async with owner_process(SHM, 4096, name="p2") as other:
            await shuffled_handoff(other, decode, "u", seed=2)


async def test_a_stopped_owner_is_lost_and_nothing_lands_after_it_goes_on(kind):
    size = 1024 * 1024  # the pool is far more than the socket buffers hold
    async with owner_process(kind, size) as owner, Decode(kind, size, timings=QUICK) as decode:
        key = decode.key(owner, "t")
        blocks = list(range(NUM_BLOCKS))
        await owner.offer(key, decode.me, [blocks[:60], []])  # no end: it cannot be too quick
        transfer = decode.incoming(owner, key, blocks)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: decode.has_begun(0))
        owner.signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError, match=r"nothing from the peer|no read has ended"):
            await pulling
        assert not decode.has_begun(NUM_BLOCKS - 1)
        await transfer.wait_quiesced()
        decode.mark(blocks)
        owner.signal(signal.SIGCONT)
        await until(lambda: "t" in owner.ended or not owner.is_running)
        assert decode.is_marked(blocks)
        if owner.is_running:
            await shuffled_handoff(owner, decode, "u", seed=2)
            return
        assert kind is NIXL_TCP  # UCX 1.23 aborts where it owes an answer to an agent that has gone
        async with owner_process(kind, size, name="p2") as other:
            await shuffled_handoff(other, decode, "u", seed=2)


async def test_scratch_of_a_stopped_owner_is_written_to_by_nobody_after_the_fence(kind):
    """As above, where decode's blocks are of two tokens and prefill's are of one."""
    size = 1024 * 1024
    scratch = ScratchArenas(lot_bytes=NUM_BLOCKS * size, arena_bytes=NUM_BLOCKS * size)
    arena = scratch.of(size)
    async with (
        owner_process(kind, size) as owner,
        Decode(kind, size, timings=QUICK, block_size=2, scratch=scratch) as decode,
    ):
        key = decode.key(owner, "t")
        blocks, places = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS // 2))
        await owner.offer(key, decode.me, [blocks[:60], []])
        transfer = decode.incoming(owner, key, places)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: any(arena.memory.block(BlockId(0))[:64]))
        owner.signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError, match=r"nothing from the peer|no read has ended"):
            await pulling
        assert not any(arena.memory.block(BlockId(59))[:64])
        await transfer.wait_quiesced()
        assert arena.free_lots == 1
        for block_id in blocks:
            arena.memory.block(BlockId(block_id))[:] = bytes([MARK]) * size
        decode.mark(places)
        owner.signal(signal.SIGCONT)
        await until(lambda: "t" in owner.ended or not owner.is_running)
        assert all(
            arena.memory.block(BlockId(block_id)) == bytes([MARK]) * size for block_id in blocks
        )
        assert decode.is_marked(places)
        assert owner.is_running or kind is NIXL_TCP  # see above


async def test_blocks_of_a_cancelled_fetch_can_be_reused_after_the_fence(kind):
    size = 512 * 1024
    async with owner_process(kind, size) as owner, Decode(kind, size) as decode:
        blocks = list(range(NUM_BLOCKS))
        for number in range(5):
            name = f"t{number}"
            key = decode.key(owner, name)
            decode.mark(blocks)
            decode.memory.block(BlockId(0))[:64] = bytes(64)
            await owner.offer(key, decode.me, [blocks[:60], []])  # no end: it cannot be too quick
            transfer = decode.incoming(owner, key, blocks)
            pulling = asyncio.create_task(transfer.pull())
            await until(lambda: decode.has_begun(0))
            pulling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pulling
            await transfer.wait_quiesced()
            decode.mark(blocks)
            await until(functools.partial(owner.ended.__contains__, name))
            assert decode.is_marked(blocks)
        assert decode.receiver.stats().by_outcome == {"cancelled": 5}
        await shuffled_handoff(owner, decode, "u", seed=3)


async def test_a_block_that_was_freed_under_the_lease_makes_the_handoff_invalid(kind):
    async with owner_process(kind, 4096) as owner, Decode(kind, 4096) as decode:
        key = decode.key(owner, "t")
        await owner.offer(key, decode.me, [[5, 6, 7], []])
        transfer = decode.incoming(owner, key, [0, 1, 2])
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: decode.holds([5, 6, 7], [0, 1, 2]))
        await owner.ask("free", block_ids=[6])
        await owner.ask("grant", key=asdict(key), start=3, block_ids=[], token_id=7)
        with pytest.raises(InvalidTransferError):
            await pulling
        await transfer.wait_quiesced()
        assert decode.receiver.stats().blocks_published == 0
        await until(lambda: owner.ended == {"t": ["revoked"]})


async def test_an_expired_lease_ends_the_handoff_on_both_sides(kind):
    async with (
        owner_process(kind, 4096, lease_s=0.5) as owner,
        Decode(kind, 4096, lease_s=500.0) as decode,  # renews far too late
    ):
        key = decode.key(owner, "t")
        await owner.offer(key, decode.me, [[5], []])
        with pytest.raises(LeaseLostError, match="expired"):
            await decode.incoming(owner, key, [0, 1]).pull()
        await until(lambda: owner.ended == {"t": ["expired"]})


async def test_renewals_hold_the_lease_for_as_long_as_prefill_computes(kind):
    lease_s = 2.0 if kind.name == "nixl" else 0.5  # an agent's start alone may take half a second
    async with (
        owner_process(kind, 4096, lease_s=lease_s) as owner,
        Decode(kind, 4096, lease_s=lease_s) as decode,
    ):
        key = decode.key(owner, "t")
        await owner.offer(key, decode.me, [[5], []])
        pulling = asyncio.create_task(decode.incoming(owner, key, [0, 1]).pull())
        other = decode.key(owner, "never pulled")
        await owner.offer(other, decode.me, [[6], []])
        await until(lambda: "never pulled" in owner.ended)  # a lease's time has passed
        await owner.ask("grant", key=asdict(key), start=1, block_ids=[6], token_id=7)
        await pulling
        assert decode.holds([5, 6], [0, 1])


@pytest.mark.parametrize(
    ("damage", "error"), [(Damage.FLIP, CorruptTransferError), (Damage.CUT, PeerLostError)]
)
async def test_a_wrong_digest_and_a_truncated_frame_fail_the_handoff(kind, damage, error):
    size = 256 * 1024
    async with owner_process(kind, size) as owner, Decode(kind, size) as decode:
        target = owner.info.endpoint(kind.name)
        in_a_block = 3 * size + 1000 if kind.block_frame is FrameType.DATA else 1100
        async with stream_proxy(kind, target, damage, [in_a_block]) as (address, _):
            direct = owner.info
            owner.info = replace(direct, endpoints=((kind.name, address),))
            key = decode.key(owner, "t")
            await owner.offer(key, decode.me, [list(range(8))])
            transfer = decode.incoming(owner, key, range(8))
            with pytest.raises(error):
                await transfer.pull()
            await transfer.wait_quiesced()
            assert decode.receiver.stats().blocks_published == 0
            await until(lambda: "t" in owner.ended)
            owner.info = direct
        await shuffled_handoff(owner, decode, "u", seed=4)


async def test_a_restarted_owner_at_the_old_address_refuses_the_old_grant(kind):
    async with owner_process(kind, 4096) as owner, Decode(kind, 4096) as decode:
        old = decode.key(owner, "t")
        async with owner_process(kind, 4096, name="restarted") as restarted:
            owner.info = replace(owner.info, endpoints=restarted.info.endpoints)
            with pytest.raises(LinkRefusedError, match="who answers is not p-1"):
                await decode.incoming(owner, old, [0]).pull()


async def test_fifty_transfers_with_random_cancels_leave_nothing_behind(kind):
    size, count = 64 * 1024, 16
    rng = random.Random(20)
    async with (
        owner_process(kind, size) as owner,
        Decode(kind, size, num_blocks=50 * count) as decode,
    ):
        await shuffled_handoff(owner, decode, "warm", seed=5)
        await until(lambda: "warm" in owner.ended)
        before = await owner.ask("stats")
        process = psutil.Process()
        gc.collect()
        mine = process.num_fds(), threading.active_count()
        works = []
        for number in range(50):
            key = decode.key(owner, f"t{number}")
            sources = rng.sample(range(NUM_BLOCKS), count)
            places = list(range(number * count, (number + 1) * count))
            transfer = decode.incoming(owner, key, places)
            await owner.offer(key, decode.me, [sources[:5], sources[5:]])
            works.append((transfer, sources, places))
        pulls = [asyncio.create_task(transfer.pull()) for transfer, _, _ in works]
        victims = rng.sample(range(50), 20)
        for victim in victims:
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            pulls[victim].cancel()
        results = await asyncio.gather(*pulls, return_exceptions=True)
        landed = 0
        for number, ((transfer, sources, places), result) in enumerate(
            zip(works, results, strict=True)
        ):
            await transfer.wait_quiesced()
            if isinstance(result, asyncio.CancelledError):
                assert number in victims
            else:
                assert decode.holds(sources, places), result
                landed += 1
        assert landed >= 30
        await until(lambda: len(owner.ended) == 51)
        await shuffled_handoff(owner, decode, "last", seed=6)  # what is kept of a peer is there
        await until(lambda: "last" in owner.ended)
        assert all(len(reasons) == 1 for reasons in owner.ended.values())
        after = await owner.ask("stats")
        assert after["active"] == 0
        assert (after["descriptors"], after["threads"]) == (
            before["descriptors"],
            before["threads"],
        )
        gc.collect()
        assert (process.num_fds(), threading.active_count()) == mine
        assert decode.receiver.stats().active == 0
