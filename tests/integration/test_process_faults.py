"""Either process of a transfer is killed or stopped, in each state of the transfer.

Whoever is left ends the transfer by itself, uses nothing of it, holds nothing for it, and serves
others. What a stopped process does when it goes on changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

import psutil
import pytest

from kv_transfer.handoff import PeerInfo
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.transport import CorruptTransferError, PeerLostError
from kv_transfer.transports import wire
from kv_transfer.transports.wire import FrameType
from tests.fakes.kv_processes import (
    NUM_BLOCKS,
    PATIENT,
    QUICK,
    Decode,
    OwnerProcess,
    ReaderProcess,
    key_of,
    owner_process,
    reader_process,
    shuffled_handoff,
)
from tests.fakes.release import assert_released_in_time, seconds_until
from tests.fakes.stream_kinds import NIXL, SHM, STREAM_KINDS, StreamKind, kind_parameters
from tests.fakes.stream_proxy import Damage, stream_proxy
from tests.fakes.until import until

SIZE = 4096
VERDICT = wire.MAGIC + bytes([wire.WIRE_VERSION, FrameType.VERDICT])
"""How the frame begins that says VALID."""
LOCATED = wire.MAGIC + bytes([wire.WIRE_VERSION, FrameType.LOCATED])
"""How the frame begins that says where a block is, or that it comes."""
IN_A_BLOCK_OF_MANY: dict[str, Callable[[int], int | bytes]] = {
    "tcp": lambda size: 2 * size + 5000,
    "shm": lambda _: 20 * wire.HEADER_BYTES + 1000,
    "nixl": lambda _: LOCATED,  # its directions come first, as long as UCX makes them
    "torch": lambda _: LOCATED,  # there is no telling how much is said until its group is made
}
"""Where to damage what an owner sends, given the size of a block."""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
BLOCKS = list(range(8))


@pytest.fixture(params=kind_parameters((*STREAM_KINDS, NIXL)))
def kind(request):
    return request.param


def through(owner: PeerInfo, kind: StreamKind, address: str) -> PeerInfo:
    """The same worker, as it is reached at another address."""
    return replace(owner, endpoints=((kind.name, address),))


# -- the process that is read from ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A transfer that has been brought to a state."""

    transfer: IncomingTransfer
    pulling: asyncio.Task[object]


async def begin(owner: OwnerProcess, decode: Decode, grants: list[list[int]]) -> Reading:
    key = decode.key(owner, "t")
    await owner.offer(key, decode.me, grants)
    transfer = decode.incoming(owner, key, BLOCKS)
    return Reading(transfer=transfer, pulling=asyncio.create_task(transfer.pull()))


async def while_connecting(kind, owner, decode, number) -> Reading:
    """It is asked when it can answer no more."""
    key = decode.key(owner, "t")
    await owner.offer(key, decode.me, [BLOCKS])
    owner.signal(number)
    if number is KILL:
        await owner.wait()
    transfer = decode.incoming(owner, key, BLOCKS)
    return Reading(transfer=transfer, pulling=asyncio.create_task(transfer.pull()))


async def between_grants(kind, owner, decode, number) -> Reading:
    """What was granted has landed; it computes the rest."""
    reading = await begin(owner, decode, [BLOCKS[:4], []])
    await until(lambda: decode.holds(BLOCKS[:4], BLOCKS[:4]))
    owner.signal(number)
    return reading


async def before_the_verdict(kind, owner, decode, number) -> Reading:
    """It has confirmed and forgotten; that has not arrived."""
    async with stream_proxy(kind, owner.info.endpoint(kind.name), Damage.STALL, [VERDICT]) as (
        address,
        proxy,
    ):
        owner.info = through(owner.info, kind, address)
        reading = await begin(owner, decode, [BLOCKS])
        await proxy.damaged.wait()
        owner.signal(number)
        await asyncio.wait({reading.pulling})
    return reading


OWNER_STATES = (while_connecting, between_grants, before_the_verdict)


@pytest.mark.parametrize("number", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("in_state", OWNER_STATES, ids=lambda state: state.__name__)
async def test_reader_outlives_an_owner(kind, in_state, number):
    process = psutil.Process()
    timings = QUICK if number is STOP else PATIENT  # a stop can be told by silence alone
    async with (
        Decode(kind, SIZE, timings=timings) as decode,
        owner_process(kind, SIZE, name="p2") as other,
    ):
        await shuffled_handoff(other, decode, "warm", seed=1)
        await until(lambda: "warm" in other.ended)
        gc.collect()
        num_fds, num_threads = process.num_fds(), threading.active_count()
        async with owner_process(kind, SIZE) as owner:
            reading = await in_state(kind, owner, decode, number)
            with pytest.raises(PeerLostError):
                await reading.pulling
            await reading.transfer.wait_quiesced()
            decode.mark(BLOCKS)
            if number is STOP:
                owner.signal(signal.SIGCONT)
                await until(lambda: "t" in owner.ended)
        assert decode.is_marked(BLOCKS)
        assert decode.receiver.stats().by_outcome == {"landed": 1, "peer_lost": 1}
        if not (kind is SHM and in_state is before_the_verdict):
            # There the proxy, in this process, is whom the mapping is bound to.
            # Not above, rather than equal: what the first hand-off used may be closing still.
            await until(
                lambda: process.num_fds() <= num_fds and threading.active_count() <= num_threads
            )
        await shuffled_handoff(other, decode, "u", seed=2)


async def test_a_killed_owner_s_blocks_have_passed_their_fence_a_second_later(kind):
    """On decode, where they are in quarantine until then; counted from the kill itself."""

    async def release() -> float:
        async with (
            Decode(kind, SIZE, timings=PATIENT) as decode,
            owner_process(kind, SIZE) as owner,
        ):
            reading = await between_grants(kind, owner, decode, KILL)
            quiet = asyncio.create_task(reading.transfer.wait_quiesced())
            seconds = await seconds_until(quiet.done)
            with pytest.raises(PeerLostError):
                await reading.pulling
            return seconds

    await assert_released_in_time(release)


async def test_worker_that_comes_back_at_its_address_serves_at_once(kind):
    """F8, F9: under its name, at its address, as another incarnation."""
    async with (
        Decode(kind, SIZE) as decode,
        owner_process(kind, SIZE) as owner,
        stream_proxy(kind, owner.info.endpoint(kind.name), Damage.FLIP, []) as (address, proxy),
    ):
        first = through(owner.info, kind, address)
        owner.info = first
        await shuffled_handoff(owner, decode, "before", seed=1)
        reading = await begin(owner, decode, [BLOCKS[:4], []])
        await until(lambda: decode.holds(BLOCKS[:4], BLOCKS[:4]))
        owner.signal(KILL)
        with pytest.raises(PeerLostError):
            await reading.pulling
        decode.expected.fill(seed=2)
        async with owner_process(kind, SIZE, incarnation="p-2", seed=2) as again:
            proxy.target = again.info.endpoint(kind.name)
            again.info = through(again.info, kind, address)
            for number in range(20):
                await shuffled_handoff(again, decode, f"u{number}", seed=number)
            await until(lambda: len(again.ended) == 20)
        assert decode.receiver.stats().by_outcome == {"landed": 21, "peer_lost": 1}


async def test_one_bad_block_of_many_ends_them_all(kind):
    """F7: the others are on their way when it is found."""
    size = 1024 * 1024  # most of the pool is still to come then
    blocks = list(range(NUM_BLOCKS))
    async with owner_process(kind, size) as owner, Decode(kind, size) as decode:
        at = IN_A_BLOCK_OF_MANY[kind.name](size)
        async with stream_proxy(kind, owner.info.endpoint(kind.name), Damage.FLIP, [at]) as (
            address,
            _,
        ):
            owner.info = through(owner.info, kind, address)
            key = decode.key(owner, "t")
            await owner.offer(key, decode.me, [blocks])
            transfer = decode.incoming(owner, key, blocks)
            with pytest.raises(CorruptTransferError):
                await transfer.pull()
            await transfer.wait_quiesced()
            decode.mark(blocks)
            await until(lambda: "t" in owner.ended)
            assert decode.is_marked(blocks)
            assert decode.receiver.stats().blocks_published == 0


# -- the process that reads ----------------------------------------------------------------------


@asynccontextmanager
async def pair(
    kind: StreamKind, size: int = SIZE, lease_s: float = 5.0
) -> AsyncIterator[tuple[OwnerProcess, ReaderProcess]]:
    async with (
        owner_process(kind, size, lease_s=lease_s) as owner,
        reader_process(kind, size, lease_s=lease_s) as reader,
    ):
        yield owner, reader


async def reads_nothing_yet(kind, owner, reader, number) -> None:
    """It was accepted, and connects no more."""
    key = key_of(owner.info, reader.info, "t")
    await owner.offer(key, reader.info, [BLOCKS])
    reader.signal(number)


async def waits_for_grants(kind, owner, reader, number) -> None:
    """It has read what was granted."""
    key = key_of(owner.info, reader.info, "t")
    await owner.offer(key, reader.info, [BLOCKS[:4], []])
    await reader.pull(owner.info, key, BLOCKS)
    await reader.has_begun(3)
    reader.signal(number)


async def has_not_confirmed(kind, owner, reader, number) -> None:
    """The last grant is made when it can take it no more."""
    await waits_for_grants(kind, owner, reader, number)
    key = key_of(owner.info, reader.info, "t")
    await owner.grant(key, 4, BLOCKS[4:], is_last=True)


READER_STATES = (reads_nothing_yet, waits_for_grants, has_not_confirmed)


@pytest.mark.parametrize("in_state", READER_STATES, ids=lambda state: state.__name__)
async def test_owner_of_a_killed_reader_holds_nothing(kind, in_state):
    """At once where there is a connection, by the lease where there was none."""
    lease_s = 0.5 if in_state is reads_nothing_yet else 500.0
    async with pair(kind, lease_s=lease_s) as (owner, reader):
        await in_state(kind, owner, reader, KILL)
        await until(lambda: "t" in owner.ended)
        expected = "expired" if in_state is reads_nothing_yet else "peer_lost"
        assert owner.ended == {"t": [expected]}
        assert (await owner.ask("stats"))["active"] == 0
        async with Decode(kind, SIZE) as decode:
            await shuffled_handoff(owner, decode, "u", seed=2)


@pytest.mark.parametrize("in_state", READER_STATES[1:], ids=lambda state: state.__name__)
async def test_owner_may_free_a_killed_reader_s_blocks_a_second_later(kind, in_state):
    """Its connection tells, and no lease has to end."""

    async def release() -> float:
        async with pair(kind, lease_s=500.0) as (owner, reader):
            await in_state(kind, owner, reader, KILL)
            return await seconds_until(lambda: "t" in owner.ended)

    await assert_released_in_time(release)


@pytest.mark.parametrize("in_state", READER_STATES, ids=lambda state: state.__name__)
async def test_stopped_reader_loses_its_lease_and_uses_nothing_when_it_goes_on(kind, in_state):
    """F1: its blocks belong to others by then."""
    # The state must be reached before the lease ends: on a busy host an agent starts for a second.
    lease_s = 3.0 if kind is NIXL else 1.5
    async with pair(kind, lease_s=lease_s) as (owner, reader):
        await in_state(kind, owner, reader, STOP)
        await until(lambda: "t" in owner.ended)
        assert owner.ended == {"t": ["expired"]}
        assert (await owner.ask("stats"))["active"] == 0
        await owner.ask("free", block_ids=BLOCKS)
        reader.signal(signal.SIGCONT)
        if in_state is reads_nothing_yet:
            await reader.pull(owner.info, key_of(owner.info, reader.info, "t"), BLOCKS)
        await until(lambda: "t" in reader.outcomes)
        assert reader.outcomes["t"] in ("LeaseLostError", "PeerLostError")
        assert await reader.ask("stats") == {"active": 0, "published": 0}


async def test_reader_killed_before_the_verdict_arrives_leaves_nothing(kind):
    """The owner has confirmed, and needs no word of it."""
    async with (
        pair(kind) as (owner, reader),
        stream_proxy(kind, owner.info.endpoint(kind.name), Damage.STALL, [VERDICT]) as (
            address,
            proxy,
        ),
    ):
        key = key_of(owner.info, reader.info, "t")
        await owner.offer(key, reader.info, [BLOCKS])
        await reader.ask(
            "pull",
            peer=asdict(through(owner.info, kind, address)),
            key=asdict(key),
            places=BLOCKS,
        )
        await proxy.damaged.wait()
        reader.signal(KILL)
        await reader.wait()
        assert owner.ended == {"t": ["confirmed"]}
        assert (await owner.ask("stats"))["active"] == 0
