"""Workers killed under load: every client gets its right text all the same.

These run last: each takes a worker away and gives the server back whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Literal

import pytest

from tests.tools.asking import make_client
from tests.tools.baton_server import BatonServer
from tests.tools.load import HANG_S, REQUEST_TIMEOUT_S, Load, answers_of
from tests.tools.scrape import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

RESTART_TIMEOUT_S = 180.0

Victim = Literal["Prefill", "Decode"]


async def watch(server: BatonServer, role: Victim, *, killed_pid: int, before: Scrape) -> Scrape:
    """Wait until hand-offs succeed again through the worker that took the victim's place."""

    def is_back(now: Scrape) -> bool:
        try:
            is_new = server.replica_pid(role) != killed_pid
        except LookupError:
            return False
        # The new worker counts from zero; the other one goes on from where it was.
        sent = now.value("baton_transfer_blocks_total", role="prefill", direction="sent")
        landed = now.value("baton_transfers_total", role="decode", outcome="landed")
        if role == "Prefill":
            landed -= before.value("baton_transfers_total", role="decode", outcome="landed")
        else:
            sent -= before.value("baton_transfer_blocks_total", role="prefill", direction="sent")
        return is_new and sent > 0 and landed > 0

    return await asyncio.to_thread(
        server.wait_for, is_back, timeout_s=RESTART_TIMEOUT_S, what=f"hand-offs with a new {role}"
    )


@pytest.mark.parametrize("victim", ["Prefill", "Decode"])
async def test_a_killed_worker_costs_no_answer_and_comes_back(
    baton_server: BatonServer, victim: Victim
) -> None:
    await asyncio.to_thread(baton_server.wait_until_idle)
    async with make_client(baton_server.base_url, timeout_s=HANG_S) as client:
        client.headers["x-request-timeout-seconds"] = str(REQUEST_TIMEOUT_S)
        load = Load(client=client, expected=await answers_of(client))
        load.start()
        async with asyncio.timeout(HANG_S):
            await load.all_answered.wait()
        # A hand-off is going on: both of its ends matter.
        before = await asyncio.to_thread(
            baton_server.wait_for,
            lambda now: now.value("baton_leases_active", role="prefill") > 0,
            timeout_s=60,
            what="a prompt is handed over",
        )
        pid = baton_server.replica_pid(victim)
        os.kill(pid, signal.SIGKILL)
        try:
            await watch(baton_server, victim, killed_pid=pid, before=before)
        finally:
            await load.stop()

        print(f"{victim} killed: {len(load.endings)} answers, failed: {dict(load.failures())}")
        assert load.wrong() == []
        # Without prefill, decode computes the prompts; without decode, Front waits for a new one
        # and goes on from the tokens that its clients have.
        assert load.failures() == {}
        assert await answers_of(client) == load.expected

    after = await asyncio.to_thread(baton_server.wait_until_idle)
    for role in ("decode", "prefill"):
        assert after.available(role) == before.blocks(role, "total")
