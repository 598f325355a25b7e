"""Workers killed under load: every client gets its right text all the same.

These run last: each takes a worker away and gives the server back whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import pytest

from tests.tools.asking import Ending, ask, make_client, story_request
from tests.tools.baton_server import BatonServer
from tests.tools.scrape import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

NUM_CLIENTS = 8
REQUEST_TIMEOUT_S = 90.0
"""Of a request, by the server; a client that waits longer has been forgotten."""
HANG_S = REQUEST_TIMEOUT_S + 30.0
RESTART_TIMEOUT_S = 180.0

Victim = Literal["Prefill", "Decode"]


def handed_over(index: int) -> dict[str, Any]:
    """A client's request, under a salt of its own: what is found is not handed over."""
    return {**story_request(index), "cache_salt": uuid.uuid4().hex}


@dataclass(slots=True, kw_only=True)
class Load:
    """Clients that ask the same again and again, and what each of them was answered."""

    client: httpx.AsyncClient
    expected: list[str]
    is_over: bool = False
    endings: list[tuple[int, Ending]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """Let all clients begin."""
        self.tasks = [asyncio.create_task(self._loop(index)) for index in range(NUM_CLIENTS)]

    async def stop(self) -> None:
        """Let each client finish its last request; TimeoutError if one never does."""
        self.is_over = True
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self.tasks)

    async def _loop(self, index: int) -> None:
        while not self.is_over:
            ending = await ask(self.client, handed_over(index))
            self.endings.append((index, ending))
            if len({answered for answered, _ in self.endings}) == NUM_CLIENTS:
                self.all_answered.set()

    def wrong(self) -> list[tuple[int, Ending]]:
        """Answers that are neither the expected text nor a failure that says so."""
        return [
            (index, ending)
            for index, ending in self.endings
            if not ending.is_failure
            and not (ending.is_whole and ending.text == self.expected[index])
        ]

    def failures(self) -> Counter[str]:
        """Failed answers by status and code."""
        return Counter(
            f"{ending.status} {ending.error_code}"
            for _, ending in self.endings
            if ending.is_failure
        )


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


async def answers_of(client: httpx.AsyncClient) -> list[str]:
    """The text of each client's request, asked one at a time."""
    endings = [await ask(client, handed_over(index)) for index in range(NUM_CLIENTS)]
    assert all(ending.is_whole for ending in endings)
    return [ending.text for ending in endings]


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
