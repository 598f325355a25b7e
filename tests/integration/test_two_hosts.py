"""Prefill and decode on two hosts, between which the network is cut and healed (as root)."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import psutil
import pytest
from torch.distributed import HashStore

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import ReleaseReason
from kv_transfer.transport import PeerLostError
from kv_transfer.transports.group_backends import GlooBackend
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.kv_link import PLACES, POISON, kv_link
from tests.fakes.model_runner import generate
from tests.fakes.stream_kinds import QUICK, STREAM_KINDS
from tests.fakes.two_hosts import (
    AcrossHosts,
    CannotMakeHostsError,
    Host,
    TwoHosts,
    two_hosts,
)
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams

ROUNDS = 50 if os.environ.get("BATON_TEST_ALL") == "1" else 6
CROSS_HOST = [kind for kind in STREAM_KINDS if kind.transport().capabilities.cross_host]
MARK = 0x77
OTHER_PLACES = [BlockId(block_id) for block_id in (3, 4, 6, 8, 10, 11)]
PROMPT = tuple(range(100, 120))
NUM_TOKENS = 6


@pytest.fixture
def hosts():
    try:
        with two_hosts() as made:
            yield made
    except CannotMakeHostsError as error:
        pytest.skip(str(error))


@pytest.fixture(params=CROSS_HOST, ids=lambda kind: kind.name)
def kind(request):
    return request.param


def across(kind, hosts, timings):
    return AcrossHosts(lambda address: kind.transport(host=address, timings=timings), hosts)


@pytest.mark.parametrize("end", [0, 1], ids=["prefill's end", "decode's end"])
async def test_a_cut_link_ends_the_transfer_on_both_sides_and_a_healed_one_serves(kind, hosts, end):
    """F49, with the times that a server has: 2 s of silence, a lease of 5 s."""
    transport = across(kind, hosts, StreamTimings())
    size = 4 * 1024 * 1024  # 24 MiB are one second of the link
    async with kv_link(transport, clock=time.monotonic, sweep_s=0.25, block_bytes=size) as link:
        transfer = link.incoming(link.offer(), deadline_s=500.0)
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: link.destination.block(PLACES[0])[0] != POISON)
        hosts.cut(end)
        with pytest.raises(PeerLostError, match=r"nothing from the peer for 2\.0 s"):
            await pulling
        await transfer.wait_quiesced()
        assert not link.has_arrived()
        mark = bytes([MARK]) * size
        for place in PLACES:
            link.destination.block(place)[:] = mark
        assert await link.next_end() is ReleaseReason.EXPIRED
        assert link.sender.stats().active_leases == 0

        hosts.heal()  # what was under way may come now
        await link.incoming(link.offer("u"), OTHER_PLACES).pull()
        assert link.has_arrived(OTHER_PLACES)
        assert await link.next_end() is ReleaseReason.CONFIRMED
        assert all(link.destination.block(place) == mark for place in PLACES)


async def ask(rig: Rig, number: int) -> str:
    """Who prefilled it; the tokens are the model's."""
    request = generate_request(PROMPT, SamplingParams(max_tokens=NUM_TOKENS), number=number)
    client = Client(rig, request)
    end = await client.finished()
    assert client.token_ids == generate(PROMPT, NUM_TOKENS)
    return end.prefilled_by


def held() -> tuple[int, int]:
    return psutil.Process().num_fds(), threading.active_count()


@pytest.mark.timeout(60 + 10 * ROUNDS)
async def test_workers_outlive_a_link_that_is_cut_and_healed_again_and_again(kind, hosts):
    """F49, F50: no request fails, nothing is held, and no restart is needed."""
    config = RigConfig(
        num_prefill=1,
        lease_s=1.0,
        decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=60.0),
    )
    async with worker_rig(config, transport=across(kind, hosts, QUICK)) as rig:
        runner = rig.prefill_sides[0].runner
        assert await ask(rig, 0) == "prefill-0"
        await rig.settled()
        before = held()
        for number in range(ROUNDS):
            rig.transport.connected.clear()
            runner.hold()
            asking = asyncio.create_task(ask(rig, number))
            await until(lambda: runner.begun.is_set() and rig.transport.connected.is_set())
            hosts.cut(number % 2)
            assert await asking == "decode-0"
            runner.let_go()
            await rig.settled()
            hosts.heal()
            assert await ask(rig, number) == "prefill-0"
            await rig.settled()
        # Both attempts of each round; a first packet after the link is up may be lost as well.
        failures = rig.decode.stats()[2].failures
        assert set(failures) == {"PeerLostError"}
        assert failures["PeerLostError"] >= 2 * ROUNDS
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_a_group_that_gives_up_connecting_leaves_nothing_for_when_the_link_is_healed(hosts):
    """With a device that groups share, Gloo calls back into the one that it has freed."""
    gc.collect()
    before = held()
    for number in range(2):
        hosts.cut(number)
        assert set(made_between(hosts)) == {"no connection"}
        hosts.heal()
        time.sleep(1.5)  # the first retry of what was on its way comes a second after it
        assert set(made_between(hosts)) == {"a group"}
    gc.collect()
    assert held() == before


def made_between(hosts: TwoHosts) -> list[str]:
    """What each end gets that makes a group with the other."""
    store = HashStore()
    ends: list[str] = []

    def make(host: Host, rank: int) -> None:
        host.enter()
        try:
            GlooBackend(host=host.address, connect_s=0.2).make(store, rank)
        except RuntimeError:
            ends.append("no connection")
        else:
            ends.append("a group")

    making = [
        threading.Thread(target=make, args=(host, rank))
        for rank, host in enumerate((hosts.prefill, hosts.decode))
    ]
    for thread in making:
        thread.start()
    for thread in making:
        thread.join()
    return ends
