"""What only the nixl transport must do: agents between processes, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import threading

import psutil
import pytest

from kv_transfer.transport import PeerLostError
from tests.fakes.kv_processes import NUM_BLOCKS, Decode, owner_process, shuffled_handoff
from tests.fakes.stream_kinds import NIXL, NIXL_TCP, kind_parameters

SIZE = 64 * 1024


@pytest.fixture(params=kind_parameters((NIXL, NIXL_TCP)))
def kind(request):
    return request.param


async def test_transfers_that_begin_at_once_share_one_agent(kind):
    """Eight of them meet a peer that is not known yet (F12)."""
    async with owner_process(kind, SIZE) as owner, Decode(kind, SIZE, num_blocks=640) as decode:
        keys = [decode.key(owner, f"t{number}") for number in range(8)]
        for key in keys:
            await owner.offer(key, decode.me, [list(range(NUM_BLOCKS))])
        before = psutil.Process().num_fds()
        transfers = [
            decode.incoming(owner, key, range(number * NUM_BLOCKS, (number + 1) * NUM_BLOCKS))
            for number, key in enumerate(keys)
        ]
        await asyncio.gather(*(transfer.pull() for transfer in transfers))
        for number in range(8):
            places = range(number * NUM_BLOCKS, (number + 1) * NUM_BLOCKS)
            assert decode.holds(range(NUM_BLOCKS), places)
        first = psutil.Process().num_fds() - before
        assert first < 8 * 10  # an agent alone takes about ten


async def test_eight_workers_of_one_process_read_from_the_same_owner(kind):
    """Each with its agent and its thread."""
    async with contextlib.AsyncExitStack() as opened:
        owner = await opened.enter_async_context(owner_process(kind, SIZE))
        workers = [await opened.enter_async_context(Decode(kind, SIZE)) for _ in range(8)]
        await asyncio.gather(
            *(
                shuffled_handoff(owner, worker, f"t{number}", seed=number)
                for number, worker in enumerate(workers)
            )
        )


async def test_an_owner_that_comes_back_under_its_name_is_read_anew(kind):
    """Killed each time, and another process each time (F8, F9, F10)."""
    async with Decode(kind, SIZE) as decode:
        for number in range(4):
            async with owner_process(kind, SIZE, incarnation=f"p-{number}") as owner:
                await shuffled_handoff(owner, decode, f"t{number}", seed=number)
                await shuffled_handoff(owner, decode, f"u{number}", seed=number)
                owner.signal(signal.SIGKILL)
                await owner.wait()
                with pytest.raises(PeerLostError):
                    await decode.incoming(owner, decode.key(owner, "v"), [0]).pull()


async def test_fifty_links_leave_nothing_behind(kind):
    """A decode worker that comes and goes: nothing of it stays with the owner (F49, F50)."""
    held = functools.partial(psutil.Process().num_fds)
    async with owner_process(kind, 4096) as owner:

        async def come_and_go(name):
            async with Decode(kind, 4096) as decode:
                await shuffled_handoff(owner, decode, name, seed=1)

        for number in range(5):
            await come_and_go(f"warm{number}")
        before = await owner.ask("stats")
        gc.collect()
        mine = held(), threading.active_count()
        for number in range(50):
            await come_and_go(f"t{number}")
        gc.collect()
        assert (held(), threading.active_count()) <= mine
        await owner.ask("stats")  # it has turned since the last one went
        after = await owner.ask("stats")
        assert after["descriptors"] <= before["descriptors"] + 4
