"""Scratch blocks and the fence: who may still write to them keeps them from everybody else."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.transport import CorruptTransferError, PeerLostError, TransferDeadlineError
from tests.fakes.kv_link import kv_link, one_lot, places_of
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import until

OWN_SIZE = 8
IN_THE_MIDDLE = 4
LATE = 0x5A


class Leaky(FaultyTransport):
    """Its fence does not come to pass."""

    async def wait_fence(self):
        raise OSError("cannot tell")


def repacking(transport, **arguments):
    """A link whose receiver has other blocks, and scratch for one transfer at a time."""
    return kv_link(transport, own_size=OWN_SIZE, scratch=one_lot(), **arguments)


async def hang(link, transport, name="first"):
    """A transfer that has got its scratch blocks, and waits in the middle of a fetch."""
    transfer = link.incoming(link.offer(name), places_of(0))
    pulling = asyncio.create_task(transfer.pull())
    await transport.wait_reached()
    transport.faults.clear()  # the next one is served
    return transfer, pulling


async def test_scratch_of_a_cancelled_transfer_is_nobody_elses_before_its_fence():
    """Whoever was told where to write does so at last, when another one already waits for it."""
    transport = FaultyTransport(Fault(FaultKind.HANG, IN_THE_MIDDLE))
    async with repacking(transport, lease_s=0.05) as link:
        transport.hold_fence()
        transfer, pulling = await hang(link, transport)
        pulling.cancel()
        await transport.wait_closing()
        waiting = asyncio.create_task(link.incoming(link.offer("second"), places_of(1)).pull())
        renewals = transport.renewals
        await until(lambda: transport.renewals > renewals + 2)  # its lease lasts while it waits
        assert link.arena.free_lots == 0
        memory = link.arena.memory
        scratch = [memory.block(BlockId(i)) for i in range(memory.num_blocks)]
        landed = [bytes(block) for block in scratch]
        for block in scratch:
            block[:] = bytes([LATE]) * block.nbytes
        assert any(any(block) for block in landed)  # the first one was in the middle
        assert not waiting.done()

        transport.pass_fence()

        await waiting
        assert link.has_arrived(places_of(1))
        await transfer.wait_quiesced()
        assert link.arena.free_lots == 1


async def test_who_gets_no_scratch_ends_at_its_deadline():
    transport = FaultyTransport(Fault(FaultKind.HANG, IN_THE_MIDDLE))
    async with repacking(transport) as link:
        first, pulling = await hang(link, transport)

        with pytest.raises(TransferDeadlineError, match=r"0\.05 s while active"):
            await link.incoming(link.offer("second"), places_of(1), deadline_s=0.05).pull()

        first.release()
        await asyncio.gather(pulling, return_exceptions=True)
        await link.incoming(link.offer("third"), places_of(1)).pull()
        assert link.has_arrived(places_of(1))


async def test_scratch_of_a_broken_fence_is_never_lent_again():
    transport = Leaky(Fault(FaultKind.DIE, IN_THE_MIDDLE))
    async with repacking(transport) as link:
        with pytest.raises(OSError, match="cannot tell"):
            await link.incoming(link.offer("first")).pull()
        assert link.arena.free_lots == 0
        landed = link.receiver.stats().digests_checked
        transport.faults.clear()

        with pytest.raises(OSError, match="cannot tell"):  # of the second's own fence
            await link.incoming(link.offer("second")).pull()

        stats = link.receiver.stats()
        assert stats.digests_checked == landed
        assert stats.by_outcome == {"fence_broken": 2}


@pytest.mark.parametrize(
    ("fault", "error"),
    [(FaultKind.DIE, PeerLostError), (FaultKind.CORRUPT, CorruptTransferError)],
)
@pytest.mark.parametrize("piece", [0, 1, IN_THE_MIDDLE])
async def test_scratch_is_free_again_however_a_transfer_ends(fault, error, piece):
    transport = FaultyTransport(Fault(fault, piece))
    async with repacking(transport) as link:
        with pytest.raises(error):
            await link.incoming(link.offer("fails")).pull()
        assert link.arena.free_lots == 1

        transport.faults.clear()
        transport.damages.clear()
        await link.incoming(link.offer("lands")).pull()

        assert link.has_arrived()
        assert link.arena.free_lots == 1


async def test_transfers_take_turns_where_scratch_is_short():
    async with repacking(FaultyTransport(), num_blocks=18) as link:
        transfers = [link.incoming(link.offer(f"t{i}"), places_of(i)) for i in range(3)]
        await asyncio.gather(*(transfer.pull() for transfer in transfers))
        assert all(link.has_arrived(places_of(i)) for i in range(3))
