"""Blocks are free on both sides within a second of any cause being known, and it is not a timer's.

Each begins with a prompt whose blocks both workers hold: a piece of its KV does not come. Killed
processes are in tests/integration/test_process_faults.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.release import assert_released_in_time, seconds_until
from tests.fakes.transport import Fault, FaultKind
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, worker_rig
from tests.unit.workers.decode_requests import (
    FOREVER_S,
    PROMPT,
    faulty_rig,
    never_answer,
    request_of,
)
from workers.decode_config import DecodeConfig
from workers.engine.sequence import SequenceStatus

ONE_BLOCK = PROMPT[:4]
STUCK = Fault(FaultKind.DELAY, 1)
"""The block, or the last grant."""
DEAD = Fault(FaultKind.DIE, 3)
"""At the verdict, which comes after both."""
LEASE_S = 500.0
CONFIG = RigConfig(
    num_prefill=1,
    lease_s=LEASE_S,
    sweep_s=0.25,  # the product's
    decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=FOREVER_S),
)
"""Nothing ends by itself in the time that a test takes."""


class Holding:
    """A request that both workers hold blocks for; decode's next attempt is never answered."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.owner = rig.prefill_sides[0]
        self.prefill = rig.prefill_workers[0]
        self.client: Client

    async def begin(self) -> None:
        """Have the prompt computed, and a part of it fetched."""
        self.rig.prefill.script = [self.prefill.prefill, never_answer]
        self.client = Client(self.rig, request_of(ONE_BLOCK, timeout_s=FOREVER_S))
        await until(lambda: self.owner.scheduler.count_by_status() == {SequenceStatus.HELD: 1})
        await self.rig.transport.faulty.wait_reached()
        assert self.prefill.stats()[1].active_leases == 1
        assert self.rig.side.pool.counts().reserved + self.rig.side.pool.counts().used > 0

    def is_owner_free(self) -> bool:
        """Prefill holds nothing."""
        return self.owner.is_empty and self.prefill.stats()[1].active_leases == 0

    def is_given_up(self) -> bool:
        """Decode has nothing to do with the transfer: its blocks are the next attempt's."""
        is_over = bool(self.rig.decode.stats()[2].failures)
        is_quiet = self.rig.receiver.stats().active == 0
        return is_over and is_quiet and self.rig.side.pool.counts().quarantined == 0

    def is_all_free(self) -> bool:
        """Nobody holds anything of the request."""
        return not self.rig.held()


async def lost_peer(holding: Holding) -> float:
    """The connection ends."""
    holding.rig.transport.faulty.resume()
    return await seconds_until(lambda: holding.is_given_up() and holding.is_owner_free())


async def leaving_caller(holding: Holding) -> float:
    """Nobody reads the answer."""
    holding.client.leave()
    return await seconds_until(holding.is_all_free)


async def deadline(holding: Holding) -> float:
    """The request's own."""
    holding.rig.expire()
    return await seconds_until(holding.is_all_free)


async def drain_of_prefill(holding: Holding) -> float:
    """Its time is over: what is left is revoked. (Over this transport decode is not told.)"""
    draining = asyncio.create_task(holding.prefill.drain(timeout_s=0.0))
    seconds = await seconds_until(holding.is_owner_free)
    await draining
    return seconds


async def drain_of_decode(holding: Holding) -> float:
    """The same of decode, whose requests end."""
    draining = asyncio.create_task(holding.rig.decode.drain(timeout_s=0.0))
    seconds = await seconds_until(holding.is_all_free)
    await draining
    return seconds


CAUSES = (lost_peer, leaving_caller, deadline, drain_of_prefill, drain_of_decode)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
async def test_blocks_are_free_a_second_after_the_cause_is_known(
    cause: Callable[[Holding], Awaitable[float]],
) -> None:
    async def release() -> float:
        faults = (STUCK, DEAD) if cause is lost_peer else (STUCK,)
        async with faulty_rig(*faults, config=CONFIG) as rig:
            holding = Holding(rig)
            await holding.begin()
            seconds = await cause(holding)
            holding.client.leave()
            rig.transport.faulty.resume()
            return seconds

    await assert_released_in_time(release)


async def test_blocks_are_free_a_second_after_a_silent_reader_s_lease_has_ended():
    """Known is the end itself, by the owner's clock, so that the sweep's period counts."""

    async def release() -> float:
        clock = FakeClock()
        async with faulty_rig(STUCK, config=replace(CONFIG, lease_clock=clock)) as rig:
            holding = Holding(rig)
            await holding.begin()
            clock.advance(LEASE_S)
            seconds = await seconds_until(holding.is_owner_free)
            holding.client.leave()
            return seconds

    await assert_released_in_time(release)


async def test_decode_has_given_up_a_revoked_transfer_a_second_later():
    """Over a real connection, whose end says so: the next renewal is far away."""

    async def release() -> float:
        async with worker_rig(replace(CONFIG, prefill_chunk_tokens=4)) as rig:
            holding = Holding(rig)
            rig.prefill.script = [holding.prefill.prefill, never_answer]
            steps: list[int] = []

            def hold_second(plan) -> None:
                steps.append(plan.step_id)
                if len(steps) == 2:
                    holding.owner.runner.hold()

            holding.owner.runner.on_execute = hold_second
            client = Client(rig, request_of(timeout_s=FOREVER_S))
            await until(lambda: rig.side.runner.read([0], 4) == list(PROMPT[:4]))
            await until(lambda: len(steps) == 2)
            draining = asyncio.create_task(holding.prefill.drain(timeout_s=0.0))
            seconds = await seconds_until(holding.is_given_up)
            holding.owner.runner.let_go()
            await draining
            client.leave()
            return seconds

    await assert_released_in_time(release)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_step_in_flight_is_waited_for_and_nothing_else(side):
    """It writes to the blocks until it has ended; the second counts from then."""

    async def release() -> float:
        async with faulty_rig(config=CONFIG) as rig:
            holding = Holding(rig)
            busy = holding.owner if side == "prefill" else rig.side
            busy.runner.hold()
            client = Client(rig, request_of())
            await until(busy.runner.begun.is_set)
            client.leave()
            await client.left()
            await until(lambda: busy.scheduler.num_live == 0)
            assert not busy.is_empty
            busy.runner.let_go()
            return await seconds_until(holding.is_all_free)

    await assert_released_in_time(release)


@pytest.mark.parametrize(("times", "is_in_time"), [((1.2, 0.1), True), ((1.2, 1.3, 1.4), False)])
async def test_what_takes_too_long_each_time_is_seen(times, is_in_time):
    left = list(times)

    async def release() -> float:
        return left.pop(0)

    with (
        contextlib.nullcontext() if is_in_time else pytest.raises(AssertionError, match="held for")
    ):
        await assert_released_in_time(release)
    assert left == []
