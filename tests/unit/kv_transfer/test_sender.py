import asyncio
import dataclasses
import threading

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import ReleaseReason, Verdict
from kv_transfer.sender import KVSender
from kv_transfer.transport import LinkRefusedError
from tests.fakes.block_memory import ByteMemory, peer_info, transfer_key
from tests.fakes.clock import FakeClock
from tests.fakes.kv_link import FIRST, kv_link
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import until


async def test_start_adds_an_endpoint_per_transport_and_nothing_else():
    async with kv_link(FaultyTransport()) as link:
        assert [name for name, _ in link.peer.endpoints] == ["faulty"]
        assert link.peer.incarnation == "p-1"


@pytest.mark.parametrize(
    ("field", "value"),
    [("fingerprint", "0" * 32), ("block_size", 8), ("max_model_len", 32), ("pool_tokens", 8)],
)
async def test_open_refuses_a_worker_that_does_not_fit_and_holds_nothing(field, value):
    async with kv_link(FaultyTransport()) as link:
        with pytest.raises(LinkRefusedError, match=str(value)):
            link.sender.open(transfer_key(), dataclasses.replace(link.me, **{field: value}))
        stats = link.sender.stats()
        assert (stats.active_leases, stats.opened, stats.refused) == (0, 0, 1)
    assert link.ended == []


@pytest.mark.parametrize(
    "key", [transfer_key(prefill="p-0"), transfer_key(decode="d-0"), transfer_key(epoch=0)]
)
async def test_open_refuses_other_incarnations_and_epochs_that_were_seen(key):
    async with kv_link(FaultyTransport()) as link:
        link.open(epoch=0)
        with pytest.raises(LinkRefusedError):
            link.sender.open(key, link.me)
        assert link.sender.stats().active_leases == 1


READERS = {transfer_key("rank 0"): "d-1", transfer_key("rank 1", decode="d-2"): "d-2"}
"""Two ranks of one decode worker, by the transfers that they asked for."""


def open_together(link):
    readers = {
        key: dataclasses.replace(link.me, incarnation=incarnation)
        for key, incarnation in READERS.items()
    }
    link.sender.open_together(readers)
    for key in readers:
        assert link.sender.grant(key, link.blocks(), FIRST)
    return tuple(readers)


@pytest.mark.parametrize("first", [0, 1])
async def test_blocks_that_two_ranks_read_are_freed_when_both_have_ended(first):
    """Each has a lease of its own; the end of one is told with that of the other."""
    async with kv_link(FaultyTransport()) as link:
        keys = open_together(link)
        assert link.sender.stats().active_leases == 2
        link.sender.revoke(keys[first], "gone")
        await until(lambda: link.sender.stats().ended == {ReleaseReason.REVOKED: 1})
        await link.turned()
        other = keys[1 - first]
        assert link.sender.stats().active_leases == 1
        assert link.ended == []

        link.sender.revoke(other, "gone as well")

        await link.next_end()
        await link.next_end()
    assert [key for key, _ in link.ended] == [keys[first], other]


async def test_a_confirmed_rank_frees_nothing_while_another_lease_lives():
    clock = FakeClock()
    async with kv_link(FaultyTransport(), clock=clock) as link:
        mine, other = open_together(link)
        await link.incoming(mine).pull()
        assert link.has_arrived()
        assert link.sender.stats().confirms == {Verdict.VALID: 1}
        assert (link.sender.stats().active_leases, link.ended) == (1, [])

        clock.advance(5.0)

        assert await link.next_end() is ReleaseReason.CONFIRMED
        assert await link.next_end() is ReleaseReason.EXPIRED
    assert link.ended == [(mine, ReleaseReason.CONFIRMED), (other, ReleaseReason.EXPIRED)]


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (transfer_key("rank 1", prefill="p-0"), "p-0"),
        (transfer_key("rank 1", decode="d-0"), "d-0"),
        (transfer_key("seen"), "epoch 0"),
        (transfer_key("rank 0", epoch=1), "one transfer id"),
    ],
)
async def test_of_ranks_all_are_opened_or_none(second, named):
    async with kv_link(FaultyTransport()) as link:
        link.open("seen")
        with pytest.raises(LinkRefusedError, match=named):
            link.sender.open_together({transfer_key("rank 0"): link.me, second: link.me})
        stats = link.sender.stats()
        assert (stats.active_leases, stats.opened, stats.refused) == (1, 1, 1)
        assert link.ended == []


async def test_a_transfer_that_never_gets_a_session_ends_by_expiry_once():
    clock = FakeClock()
    async with kv_link(FaultyTransport(), clock=clock) as link:
        key = link.open()
        clock.advance(4.9)
        assert link.sender.grant(key, link.blocks()[:1], None)
        clock.advance(0.1)
        assert await link.next_end() is ReleaseReason.EXPIRED
        assert not link.sender.grant(key, link.blocks()[1:2], None)
        link.sender.revoke(key, "late")
    assert link.ended == [(key, ReleaseReason.EXPIRED)]


async def test_a_grant_that_finds_the_lease_expired_says_so_and_the_end_is_told():
    clock = FakeClock()
    async with kv_link(FaultyTransport(), clock=clock) as link:
        key = link.open()
        clock.advance(5.0)
        assert not link.sender.grant(key, link.blocks(), FIRST)
        assert await link.next_end() is ReleaseReason.EXPIRED


async def test_a_grant_for_a_superseded_attempt_is_not_made():
    async with kv_link(FaultyTransport()) as link:
        old = link.open(epoch=0)
        link.open(epoch=1)
        assert await link.next_end() is ReleaseReason.REVOKED
        assert not link.sender.grant(old, link.blocks(), FIRST)


async def test_a_revoked_transfer_ends_without_waiting_for_a_sweep():
    async with kv_link(FaultyTransport(), sweep_s=100.0) as link:
        link.open(epoch=0)
        key = link.open(epoch=1)
        assert await link.next_end() is ReleaseReason.REVOKED  # all that the opens posted has run
        link.sender.revoke(key, "aborted")
        assert await link.next_end() is ReleaseReason.REVOKED
        assert [key.epoch for key, _ in link.ended] == [0, 1]


async def test_on_end_is_called_on_the_workers_thread_for_each_transfer_once():
    threads = []
    async with kv_link(
        FaultyTransport(),
        sweep_s=100.0,  # ends are announced without waiting for it
        on_end=lambda: threads.append(threading.current_thread()),
    ) as link:
        keys = [link.open(f"t{i}") for i in range(20)]
        for key in keys:
            link.sender.revoke(key, "aborted")
            link.sender.revoke(key, "aborted again")
        for _ in keys:
            assert await link.next_end() is ReleaseReason.REVOKED
    assert {key for key, _ in link.ended} == set(keys)
    assert threads == [threading.current_thread()] * len(keys)


async def test_close_ends_every_transfer_and_can_be_repeated():
    async with kv_link(FaultyTransport()) as link:
        key = link.open()
        await link.sender.close()
        assert link.ended == [(key, ReleaseReason.REVOKED)]
        await link.sender.close()
    assert len(link.ended) == 1


async def test_stats_count_what_was_confirmed():
    async with kv_link(FaultyTransport()) as link:
        await link.incoming(link.offer("a")).pull()
        link.sender.revoke(link.offer("b"), "aborted")
        for _ in range(2):
            await link.next_end()
        stats = link.sender.stats()
        assert stats.ended == {ReleaseReason.CONFIRMED: 1, ReleaseReason.REVOKED: 1}
        assert stats.confirms == {Verdict.VALID: 1}
        assert stats.blocks_confirmed == 6
        assert stats.bytes_confirmed == {"faulty": 6 * link.source.bytes_per_block}
        assert (stats.active_leases, stats.opened, stats.refused) == (0, 2, 0)


async def test_a_second_session_of_a_transfer_is_refused_and_leaves_the_first_alone():
    transport = FaultyTransport(Fault(FaultKind.DELAY, 0))
    async with kv_link(transport) as link:
        key = link.open()
        blocks = link.blocks()
        link.sender.grant(key, blocks[:3], None)
        first = asyncio.create_task(link.incoming(key).pull())
        await transport.wait_reached()
        transport.resume()
        with pytest.raises(LinkRefusedError, match="already"):
            await link.incoming(key, [BlockId(b) for b in range(10, 16)]).pull()
        link.sender.grant(key, blocks[3:], FIRST)
        assert (await first).num_blocks == 6


async def test_a_start_that_fails_leaves_no_thread():
    class Broken(FaultyTransport):
        def server(self, memory, authority, me):
            raise OSError("address in use")

    with pytest.raises(OSError, match="in use"):
        async with kv_link(Broken()):
            pass
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-")]


async def test_memory_that_no_transport_moves_is_refused_before_anything_listens():
    memory = ByteMemory(2, 8)
    memory.kind = "cuda"
    with pytest.raises(LinkRefusedError, match="faulty moves no blocks of a pool in cuda memory"):
        KVSender(
            memory=memory,
            me=peer_info("prefill-0", "p-1", bytes_per_block=8),
            generation_of=memory.generation_of,
            transports=[FaultyTransport()],
            on_end=lambda key, reason: None,
        )
