"""Clients that leave take with them everything that was held for them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.tools.asking import ask, make_client
from tests.tools.baton_server import MODEL, BatonServer
from tests.tools.scrape import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_CLIENTS = 100
ARRIVE_WITHIN_S = 5.0
STAY_AT_MOST_S = 4.0
IDLE_TIMEOUT_S = 60.0
SPARE_DESCRIPTORS, SPARE_THREADS = 8, 4
"""What may come and go by itself (idle connections, pools); a leak of one for each client that
left, or for each hand-off that was cut short, is many times more."""

SPARE_TASKS = 4
"""Of Serve's own, which come and go with its health checks."""

Resources = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One client's request, and when it comes and goes."""

    body: dict[str, Any]
    comes_after_s: float
    stays_s: float


def visits(seed: int) -> list[Visit]:
    """Streams and whole answers, short prompts and long ones, in an order drawn by the seed."""
    rng = random.Random(seed)
    return [
        Visit(
            body={
                "model": MODEL,
                "prompt": rng.choices(range(300, 20_000), k=_prompt_tokens(rng)),
                "max_tokens": rng.randint(50, 300),
                "stream": rng.random() < 0.5,
            },
            comes_after_s=rng.uniform(0, ARRIVE_WITHIN_S),
            stays_s=rng.uniform(0.01, STAY_AT_MOST_S),
        )
        for _ in range(NUM_CLIENTS)
    ]


def _prompt_tokens(rng: random.Random) -> int:
    return rng.randint(150, 400) if rng.random() < 0.4 else rng.randint(1, 40)


async def pay(client: httpx.AsyncClient, visit: Visit) -> bool:
    """Whether the client left before its answer was whole."""
    await asyncio.sleep(visit.comes_after_s)  # load has a pace; nothing is waited for
    try:
        async with asyncio.timeout(visit.stays_s):
            await ask(client, visit.body)
    except TimeoutError:
        return True
    return False


async def hundred_clients(server: BatonServer, seed: int) -> int:
    """Let the clients come and go; returns how many left early."""
    async with make_client(server.base_url, timeout_s=60) as client:
        left = await asyncio.gather(*(pay(client, visit) for visit in visits(seed)))
    return sum(left)


def served(scrape: Scrape) -> float:
    """Requests that were answered to their end."""
    return scrape.value("baton_requests_total", endpoint="completions", outcome="2xx")


def resources(server: BatonServer) -> Resources:
    """Open descriptors and threads of each replica."""
    return {
        role: (process.num_fds(), process.num_threads())
        for role, process in server.replicas().items()
    }


def surplus(before: Resources, after: Resources) -> Resources:
    """By how much a replica holds more than the spare ones; empty if none does."""
    grown = {
        role: (after[role][0] - before[role][0], after[role][1] - before[role][1])
        for role in before
    }
    return {
        role: (descriptors, threads)
        for role, (descriptors, threads) in grown.items()
        if descriptors > SPARE_DESCRIPTORS or threads > SPARE_THREADS
    }


def tasks(scrape: Scrape) -> dict[str, float]:
    """Tasks on the event loop of each kind of process."""
    return {
        role: scrape.value("baton_asyncio_tasks", role=role)
        for role in ("front", "decode", "prefill")
    }


def test_nothing_is_left_of_a_hundred_clients_that_left(baton_server: BatonServer) -> None:
    """Three rounds: the first one makes what is made lazily, the others must add nothing."""
    seen: list[Resources] = []
    tasks_seen: list[dict[str, float]] = []
    for seed in (1, 2, 3):
        before = baton_server.wait_until_idle()
        left = asyncio.run(hundred_clients(baton_server, seed))
        after = baton_server.wait_until_idle(timeout_s=IDLE_TIMEOUT_S)

        assert left >= NUM_CLIENTS / 2, f"seed {seed}: too few clients left early"
        # One may leave in the very moment in which its answer is whole.
        assert served(after) - served(before) <= NUM_CLIENTS - left + 1
        aborted = after.value("baton_sequences_ended_total", role="decode", outcome="aborted")
        assert aborted > before.value(
            "baton_sequences_ended_total", role="decode", outcome="aborted"
        )
        for role in ("decode", "prefill"):
            assert after.available(role) == before.available(role)
        assert after.value("baton_failed_steps_total") == 0
        seen.append(resources(baton_server))
        tasks_seen.append(tasks(after))

    print(f"descriptors and threads after each round: {seen}; tasks: {tasks_seen}")
    assert surplus(seen[0], seen[1]) == {}
    assert surplus(seen[0], seen[2]) == {}
    assert all(count > 0 for count in tasks_seen[0].values()), "a process did not say"
    for role, count in tasks_seen[0].items():
        assert max(later[role] for later in tasks_seen[1:]) <= count + SPARE_TASKS, role


async def test_a_client_that_leaves_stops_a_long_prefill(baton_server: BatonServer) -> None:
    """Without a stream nothing is ever written, so that leaving must be noticed by itself."""
    num_tokens = 1900
    body = {"model": MODEL, "prompt": [300 + i for i in range(num_tokens)], "max_tokens": 4}
    before = await asyncio.to_thread(baton_server.wait_until_idle)
    computed = before.value("baton_computed_prompt_tokens_total", role="prefill")

    async with make_client(baton_server.base_url, timeout_s=120) as client:
        asking = asyncio.create_task(ask(client, body))
        await asyncio.to_thread(
            baton_server.wait_for,
            lambda now: now.value("baton_computed_prompt_tokens_total", role="prefill") > computed,
            timeout_s=60,
            what="prefill is at work",
        )
        asking.cancel()
        await asyncio.wait([asking])
    assert asking.cancelled()
    after = await asyncio.to_thread(baton_server.wait_until_idle)

    done = after.value("baton_computed_prompt_tokens_total", role="prefill") - computed
    assert 0 < done < num_tokens
    for role in ("decode", "prefill"):
        outcomes = {
            outcome: after.value("baton_sequences_ended_total", role=role, outcome=outcome)
            - before.value("baton_sequences_ended_total", role=role, outcome=outcome)
            for outcome in ("finished", "aborted", "failed")
        }
        assert outcomes == {"finished": 0, "aborted": 1, "failed": 0}
    # Idle means that no sequence is left which could compute more.
    later = await asyncio.to_thread(baton_server.scrape)
    assert later.value("baton_computed_prompt_tokens_total", role="prefill") == computed + done
