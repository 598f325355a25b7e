"""Hand-offs between two real processes, one of which is killed, stopped or told to misbehave."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import random
import signal
import sys
import threading
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.receiver import KVReceiver
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
    PeerLostError,
)
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.block_memory import ByteMemory, peer_info
from tests.fakes.stream_kinds import SHM, STREAM_KINDS, StreamKind
from tests.fakes.stream_proxy import Damage, stream_proxy
from tests.fakes.until import until

OWNER = Path(__file__).resolve().parents[1] / "fakes" / "kv_owner.py"
NUM_BLOCKS = 64
MARK = 0x77
QUICK = StreamTimings(connect_s=2.0, silence_s=0.8)


@pytest.fixture(params=STREAM_KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


class OwnerProcess:
    """The other process, and the messages between it and the test."""

    def __init__(self, process: asyncio.subprocess.Process, info: PeerInfo) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.info = info
        self.ended: dict[str, list[str]] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, do: str, **arguments):
        """Have a command carried out; its answer."""
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "do": do, "with": arguments}) + "\n"
        self._stdin.write(line.encode())
        async with asyncio.timeout(20):
            return await self._answers[number]

    async def offer(self, key: TransferKey, me: PeerInfo, grants: list[list[int]]) -> None:
        """Open a transfer and grant lists of blocks; an empty list at the end keeps it open."""
        await self.ask("offer", key=asdict(key), decode=asdict(me))
        start = 0
        for number, block_ids in enumerate(grants):
            is_last = number == len(grants) - 1 and bool(block_ids)
            if block_ids:
                await self.ask(
                    "grant",
                    key=asdict(key),
                    start=start,
                    block_ids=block_ids,
                    token_id=7 if is_last else None,
                )
            start += len(block_ids)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def close(self) -> None:
        self._stdin.close()
        async with asyncio.timeout(20):
            await self.process.wait()
            await self._listening

    async def _listen(self) -> None:
        while line := await self._stdout.readline():
            message = json.loads(line)
            if "ended" in message:
                self.ended.setdefault(message["ended"], []).append(message["reason"])
            else:
                self._answers[message.pop("id")].set_result(message)


def arenas_mapped() -> list[str]:
    """Read-only mappings of other processes' arenas in this one."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "memfd:baton-kv" in line]


def worker(name: str, bytes_per_block: int) -> PeerInfo:
    return peer_info(
        name,
        f"{name}-1",
        bytes_per_block=bytes_per_block,
        block_size=1,
        max_model_len=NUM_BLOCKS,
        pool_tokens=NUM_BLOCKS,
    )


@asynccontextmanager
async def owner_process(
    kind: StreamKind, bytes_per_block: int, *, lease_s: float = 5.0, name: str = "p"
):
    arguments = {
        "num_blocks": NUM_BLOCKS,
        "bytes_per_block": bytes_per_block,
        "seed": 1,
        "lease_s": lease_s,
        "transport": kind.name,
        "me": asdict(worker(name, bytes_per_block)),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(OWNER),
        json.dumps(arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    first = json.loads(await process.stdout.readline())["peer"]
    first["endpoints"] = tuple(tuple(endpoint) for endpoint in first["endpoints"])
    owner = OwnerProcess(process, PeerInfo(**first))
    try:
        yield owner
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
        await owner.close()


class Decode:
    """The receiving worker in the test's process."""

    def __init__(
        self,
        kind: StreamKind,
        bytes_per_block: int,
        *,
        num_blocks: int = NUM_BLOCKS,
        lease_s: float = 5.0,
    ) -> None:
        self.memory = ByteMemory(num_blocks, bytes_per_block)
        self.expected = ByteMemory(NUM_BLOCKS, bytes_per_block)
        self.expected.fill(1)
        self.me = worker("d", bytes_per_block)
        self.receiver = KVReceiver(
            memory=self.memory,
            me=self.me,
            transports=[kind.transport(timings=QUICK)],
            lease_s=lease_s,
        )

    async def __aenter__(self):
        await self.receiver.start()
        return self

    async def __aexit__(self, *_):
        await self.receiver.close()

    def key(self, owner: OwnerProcess, transfer_id: str) -> TransferKey:
        return TransferKey(
            transfer_id=transfer_id,
            epoch=0,
            prefill_incarnation=owner.info.incarnation,
            decode_incarnation=self.me.incarnation,
        )

    def incoming(self, owner, key, places, deadline_s=30.0):
        places = [BlockId(place) for place in places]
        return self.receiver.transfer(owner.info, key, places, len(places), deadline_s)

    def mark(self, places) -> None:
        """The destination blocks get another owner, who writes into them."""
        for place in places:
            self.memory.block(BlockId(place))[:] = bytes([MARK]) * self.memory.bytes_per_block

    def is_marked(self, places) -> bool:
        mark = bytes([MARK]) * self.memory.bytes_per_block
        return all(self.memory.block(BlockId(place)) == mark for place in places)

    def holds(self, sources, places) -> bool:
        return all(
            self.expected.block(BlockId(source)) == self.memory.block(BlockId(place))
            for source, place in zip(sources, places, strict=True)
        )

    def has_begun(self, place: int) -> bool:
        return any(self.memory.block(BlockId(place))[:64])


async def shuffled_handoff(owner, decode, name, seed):
    """A whole hand-off between random blocks; checks every byte."""
    rng = random.Random(seed)
    sources, places = rng.sample(range(NUM_BLOCKS), 20), rng.sample(range(NUM_BLOCKS), 20)
    key = decode.key(owner, name)
    await owner.offer(key, decode.me, [sources[:1], sources[1:8], sources[8:]])
    landed = await decode.incoming(owner, key, places).pull()
    assert landed.first.token_id == 7
    assert decode.holds(sources, places)


async def test_blocks_arrive_whole_and_the_owner_may_free_them(kind):
    async with owner_process(kind, 64 * 1024) as owner, Decode(kind, 64 * 1024) as decode:
        for number in range(5):
            await shuffled_handoff(owner, decode, f"t{number}", seed=number)
        await until(lambda: len(owner.ended) == 5)
        assert set(map(tuple, owner.ended.values())) == {("confirmed",)}
        listening = (await owner.ask("stats"))["listening"]
        assert listening == ([] if kind is SHM else ["127.0.0.1"])


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
        with pytest.raises(PeerLostError, match="connection"):  # not by its silence
            await pulling
        await transfer.wait_quiesced()
        async with owner_process(kind, size, name="p2") as other:
            await shuffled_handoff(other, decode, "u", seed=1)


async def test_memory_of_an_owner_that_died_is_given_back_at_once():
    """Also where no transfer is under way that would notice its death."""
    async with Decode(SHM, 4096) as decode:
        async with owner_process(SHM, 4096) as owner:
            await shuffled_handoff(owner, decode, "t", seed=1)
            assert len(arenas_mapped()) == 1
            owner.signal(signal.SIGKILL)
            await until(lambda: arenas_mapped() == [])
        async with owner_process(SHM, 4096, name="p2") as other:
            await shuffled_handoff(other, decode, "u", seed=2)


async def test_a_stopped_owner_is_lost_and_nothing_lands_after_it_goes_on(kind):
    size = 1024 * 1024  # the pool is far more than the socket buffers hold
    async with owner_process(kind, size) as owner, Decode(kind, size) as decode:
        key = decode.key(owner, "t")
        blocks = list(range(NUM_BLOCKS))
        await owner.offer(key, decode.me, [blocks[:60], []])  # no end: it cannot be too quick
        transfer = decode.incoming(owner, key, blocks)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: decode.has_begun(0))
        owner.signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError, match="nothing from the peer"):
            await pulling
        assert not decode.has_begun(NUM_BLOCKS - 1)
        await transfer.wait_quiesced()
        decode.mark(blocks)
        owner.signal(signal.SIGCONT)
        await until(lambda: "t" in owner.ended)
        assert decode.is_marked(blocks)
        await shuffled_handoff(owner, decode, "u", seed=2)


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
    async with (
        owner_process(kind, 4096, lease_s=0.5) as owner,
        Decode(kind, 4096, lease_s=0.5) as decode,
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
        in_a_block = 700 if kind is SHM else 3 * size + 1000
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
            with pytest.raises(LinkRefusedError, match=r"p-1.*restarted-1"):
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
