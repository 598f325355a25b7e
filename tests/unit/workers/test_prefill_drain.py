"""A prefill worker that is taken away: what it has arrives in time, or is computed elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kv_transfer.handoff import ReleaseReason, Verdict
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, Rig, RigConfig, worker_rig
from tests.unit.workers.decode_requests import FOREVER_S, PROMPT, assert_served, request_of
from workers.decode_config import DecodeConfig
from workers.engine.loop import MAX_STEP_S

PATIENT = RigConfig(
    decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=99.0, accept_timeout_s=99.0)
)
"""A hand-off ends by what a test does, never by itself."""
ALONE = replace(PATIENT, num_prefill=1)


class Leaving:
    """A prompt whose first blocks have landed, and the worker that computes the others and goes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.worker = rig.prefill_workers[0]
        self.runner = rig.prefill_sides[0].runner
        self.client: Client
        self.draining: asyncio.Task[None]

    async def begin(self) -> None:
        """Hold the second of the prompt's two chunks."""
        steps: list[int] = []

        def hold_second(plan) -> None:
            steps.append(plan.step_id)
            if len(steps) == 2:
                self.runner.hold()

        self.runner.on_execute = hold_second
        self.client = Client(self.rig, request_of())
        await until(lambda: self.rig.side.runner.read([0, 1], 8) == list(PROMPT[:8]))

    async def drain(self, *, timeout_s: float) -> None:
        """Tell the worker to go."""
        self.draining = asyncio.create_task(self.worker.drain(timeout_s=timeout_s))
        await asyncio.sleep(0)

    async def gone(self) -> None:
        """Return once it has gone; then nobody may hold anything."""
        async with asyncio.timeout(20.0):
            await self.draining
        await self.rig.settled()
        assert not self.worker.healthy


@asynccontextmanager
async def leaving(config: RigConfig = PATIENT) -> AsyncIterator[Leaving]:
    async with worker_rig(config) as rig:
        made = Leaving(rig)
        await made.begin()
        yield made


async def test_hand_off_under_way_ends_valid_before_the_worker_goes():
    async with leaving() as made:
        await made.drain(timeout_s=FOREVER_S)
        assert not made.draining.done()
        made.runner.let_go()
        end = await assert_served(made.client)
        await made.gone()

        assert end.prefilled_by == "prefill-0"
        assert made.worker.stats()[1].confirms == {Verdict.VALID: 1}
        assert made.rig.decode.stats()[2].failures == {}


@pytest.mark.parametrize(
    ("config", "by"), [(PATIENT, "prefill-1"), (ALONE, "decode-0")], ids=["another", "none"]
)
async def test_prompt_that_comes_meanwhile_is_computed_elsewhere(config, by):
    async with leaving(config) as made:
        await made.drain(timeout_s=FOREVER_S)
        # A router that has not heard of it yet sends the first attempt there.
        others = made.rig.prefill_workers[1:]
        made.rig.prefill.script = [worker.prefill for worker in (made.worker, *others)]
        end = await assert_served(Client(made.rig, request_of(number=1)))
        made.runner.let_go()
        await assert_served(made.client)
        await made.gone()

        assert end.prefilled_by == by
        refused = 1 if by == "prefill-1" else 2  # attempts, each of which was told at once
        assert made.rig.decode.stats()[2].failures == {"HandoffRefusedError": refused}


@pytest.mark.parametrize(
    ("config", "by"), [(PATIENT, "prefill-1"), (ALONE, "decode-0")], ids=["another", "none"]
)
async def test_hand_off_that_outlasts_the_drain_is_revoked_and_made_again(config, by):
    async with leaving(config) as made:
        await made.drain(timeout_s=0.01)
        end = await assert_served(made.client)  # the held step has not ended
        made.runner.let_go()
        await made.gone()

        assert end.prefilled_by == by
        assert made.worker.stats()[1].ended == {ReleaseReason.REVOKED: 1}


async def test_worker_whose_step_hangs_is_waited_for_by_nobody():
    async with leaving() as made:
        made.rig.clock.advance(MAX_STEP_S + 1)
        await made.drain(timeout_s=FOREVER_S)
        end = await assert_served(made.client)
        made.runner.let_go()
        await made.gone()

        assert end.prefilled_by == "prefill-1"


async def test_idle_worker_goes_at_once_and_may_be_told_twice():
    async with worker_rig() as rig:
        worker = rig.prefill_workers[0]
        await worker.drain(timeout_s=FOREVER_S)
        await worker.drain(timeout_s=FOREVER_S)

        assert not worker.healthy
