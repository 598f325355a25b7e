"""Clients that leave, or workers that are killed, in a phase of a request's life, and how long
anything of it is held then.

The phase is found by what `/metrics` shows. A time measured here is never too short: it ends with
the first scrape that shows the counts back, and a scrape takes some milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.tools.baton_server import MODEL, WINDOW, BatonServer, Role
from tests.tools.faults import stopped
from tests.tools.hearing import Heard, hear
from tests.tools.scrape import Scrape, parse

__all__ = [
    "KILLS",
    "PHASES",
    "RELEASE_SETTINGS",
    "SMALL_CHUNKS",
    "Leaving",
    "Phase",
    "Release",
    "chunks_of",
]

LOCAL_TOKENS, LONG_TOKENS, SHORT_TOKENS = 500, 1500, 20
OUTPUT_TOKENS = 200
RELEASE_SETTINGS = (
    f"decode.engine.pool_tokens={2 * WINDOW}",
    f"decode.local_prefill_tokens={LOCAL_TOKENS}",
    "decode.engine.threads=1",
    "prefill.engine.threads=1",
)
SMALL_CHUNKS: Mapping[str, int] = {"decode": 64, "prefill": 128}
"""Tokens that a step computes of a prompt, by role: a step in flight is waited for."""

_BLOCKERS = 2
"""Requests of a whole window: the pool is theirs."""
_PATIENCE_S = 30.0
_RESTART_S = 240.0
"""For Serve to start another worker in the place of a killed one, and what waits for it."""
_UNSEEN_S = 1.0
"""What Front has not counted by then has not reached it."""
_STOPPED_S = (0.1, 0.5)
"""Enough for Front to send a request; too short for it to give decode up."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What can be seen of one request: scrapes before and now, and what its client has."""

    before: Scrape
    now: Scrape
    heard: Heard

    def grown(self, name: str, **labels: str) -> float:
        """By how much a value has grown since the request began."""
        return self.now.value(name, **labels) - self.before.value(name, **labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a request, by the row of `docs/architecture.md`, "Life of a request", it is in."""

    number: int
    name: str
    body: Callable[[random.Random], Body]
    is_seen: Callable[[Sight], bool] | None = None
    """None: decode is stopped meanwhile, and goes on as the client leaves."""
    is_blocked: bool = False
    """Whether other requests have the pool."""
    victim: Role | None = None
    """The worker that is killed, while the client stays; None: the client leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One client that left, or worker that was killed, in the phase that was wanted."""

    seconds: float
    """From then to the first scrape without a trace of the request, or of its hand-off."""
    scrape_s: float
    """What that scrape took."""


def _body(num_tokens: int, *, stream: bool = False) -> Callable[[random.Random], Body]:
    def make(rng: random.Random) -> Body:
        return {
            "model": MODEL,
            "prompt": [rng.randrange(300, 20_000) for _ in range(num_tokens)],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }

    return make


def _computes_here(sight: Sight) -> bool:
    computed = sight.grown("baton_computed_prompt_tokens_total", role="decode")
    return computed > 0 and sight.grown("baton_output_tokens_total", role="decode") == 0


def _computed_there(sight: Sight) -> float:
    return sight.grown("baton_computed_prompt_tokens_total", role="prefill")


def _computes_there(sight: Sight) -> bool:
    return sight.now.value("baton_leases_active") > 0 and _computed_there(sight) == 0


def _fetches(sight: Sight) -> bool:
    """Each chunk is granted and fetched once it is computed."""
    return sight.now.value("baton_transfers_active") > 0 and _computed_there(sight) > 0


def chunks_of(chunks: Mapping[str, int]) -> tuple[str, ...]:
    """The settings that have a worker of each role compute so many tokens of a prompt at once."""
    return tuple(f"{role}.engine.prefill_chunk_tokens={size}" for role, size in chunks.items())


PHASES = (
    Phase(number=3, name="Front has sent it, decode has not looked", body=_body(SHORT_TOKENS)),
    Phase(
        number=4,
        name="waits for a reservation",
        body=_body(SHORT_TOKENS),
        is_seen=lambda sight: sight.now.value("baton_queue_length", role="decode") > 0,
        is_blocked=True,
    ),
    Phase(
        number=5,
        name="its prompt is computed on decode",
        body=_body(LOCAL_TOKENS),
        is_seen=_computes_here,
    ),
    Phase(
        number=6,
        name="its first chunk is computed on prefill",
        body=_body(LONG_TOKENS),
        is_seen=_computes_there,
    ),
    Phase(
        number=7,
        name="chunks are fetched, more are computed",
        body=_body(LONG_TOKENS),
        is_seen=_fetches,
    ),
    Phase(
        number=8,
        name="decode makes tokens, nothing is sent",
        body=_body(SHORT_TOKENS),
        is_seen=lambda sight: sight.grown("baton_output_tokens_total", role="decode") > 2,
    ),
    Phase(
        number=9,
        name="the client reads a stream",
        body=_body(SHORT_TOKENS, stream=True),
        is_seen=lambda sight: len(sight.heard.times) > 2,
    ),
)

KILLS = tuple(
    Phase(
        number=7,
        name=f"{victim} is killed while chunks are fetched",
        body=_body(LONG_TOKENS),
        is_seen=_fetches,
        victim=victim,
    )
    for victim in ("Prefill", "Decode")
)


def footprint(scrape: Scrape) -> Mapping[str, float]:
    """What all requests together hold; a request that only goes on does not change it."""
    held = scrape.held()
    moving = ("reserved", "used")  # within what "missing" counts
    return {name: count for name, count in held.items() if not name.endswith(moving)}


def _is_forgotten(scrape: Scrape, victim: Role) -> bool:
    """Whether the worker that is left holds nothing for the hand-off with the killed one.

    The request itself goes on.
    """
    if victim == "Prefill":
        held = scrape.value("baton_transfers_active") + scrape.blocks("decode", "quarantined")
        return scrape.has_role("decode") and not held
    missing = scrape.blocks("prefill", "total") - scrape.available("prefill")
    held = scrape.value("baton_leases_active") + scrape.value("baton_sequences", role="prefill")
    return scrape.has_role("prefill") and not missing and not held


class Leaving:
    """One client after the other, each of which leaves in a phase."""

    def __init__(self, server: BatonServer, client: httpx.AsyncClient, rng: random.Random) -> None:
        self._server = server
        self._client = client
        self._rng = rng

    async def rounds(self, phase: Phase, wanted: int) -> AsyncIterator[Release]:
        """So many releases at most; some clients miss the phase, and after too many it ends."""
        num_found = 0
        for _ in range(8 * wanted):
            if num_found == wanted:
                return
            async with self._blocked() if phase.is_blocked else self._alone():
                release = await self._round(phase)
            if release is not None:
                num_found += 1
                yield release

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        await self._until(lambda now: now.is_idle(), what="nothing is held", timeout_s=_RESTART_S)
        yield

    @asynccontextmanager
    async def _blocked(self) -> AsyncIterator[None]:
        """All blocks of decode are reserved by others."""
        async with self._alone():
            body = {**_body(SHORT_TOKENS)(self._rng), "max_tokens": WINDOW - SHORT_TOKENS}
            blockers = [asyncio.create_task(self._ask(body, Heard())) for _ in range(_BLOCKERS)]
            try:
                decoding = {"role": "decode", "status": "decoding"}
                await self._until(
                    lambda now: now.value("baton_sequences", **decoding) == _BLOCKERS,
                    what="the pool is taken",
                )
                yield
            finally:
                for blocker in blockers:
                    blocker.cancel()
                await asyncio.wait(blockers)

    async def _round(self, phase: Phase) -> Release | None:
        """None if the request had gone on, or was over, before it was seen in the phase."""
        before = await self._scrape()
        heard = Heard()
        asking = asyncio.create_task(self._ask(phase.body(self._rng), heard))
        try:
            is_there = await self._reach(phase, before, heard, asking)
            if phase.victim is not None and is_there:
                return await self._killed(phase.victim)
        finally:
            left_at = time.monotonic()
            asking.cancel()
            await asyncio.wait({asking})
        release = await self._released(before, left_at)
        return release if is_there and asking.cancelled() else None

    async def _reach(
        self, phase: Phase, before: Scrape, heard: Heard, asking: asyncio.Task[None]
    ) -> bool:
        """Whether the request was seen in the phase."""
        if phase.is_seen is None:
            async with stopped(self._server.replica_pid("Decode")):
                await asyncio.sleep(self._rng.uniform(*_STOPPED_S))  # it leaves at a drawn moment
            return not asking.done()
        while not asking.done():
            if phase.is_seen(Sight(before=before, now=await self._scrape(), heard=heard)):
                return not asking.done()
        return False

    async def _killed(self, victim: Role) -> Release:
        """Kill a worker; AssertionError if something of its hand-off stays at the other one."""
        killed_at = time.monotonic()
        os.kill(self._server.replica_pid(victim), signal.SIGKILL)
        while True:
            asked_at = time.monotonic()
            now = await self._scrape()
            seen_at = time.monotonic()
            if _is_forgotten(now, victim):
                return Release(seconds=seen_at - killed_at, scrape_s=seen_at - asked_at)
            assert seen_at - killed_at < _PATIENCE_S, f"held: {now.relevant()}"

    async def _released(self, before: Scrape, left_at: float) -> Release | None:
        """None if the request never reached Front; AssertionError if something stays."""
        while True:
            asked_at = time.monotonic()
            now = await self._scrape()
            seen_at = time.monotonic()
            has_ended = _by_front(now) > _by_front(before)
            if has_ended and footprint(now) == footprint(before):
                return Release(seconds=seen_at - left_at, scrape_s=seen_at - asked_at)
            if not has_ended and footprint(now) == footprint(before):
                if seen_at - left_at > _UNSEEN_S:
                    return None
            elif seen_at - left_at > _PATIENCE_S:
                raise AssertionError(f"held after {_PATIENCE_S:g} s: {footprint(now)}")

    async def _until(
        self, condition: Callable[[Scrape], bool], *, what: str, timeout_s: float = _PATIENCE_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(now := await self._scrape()):
            assert time.monotonic() < deadline, f"not: {what}; {now.relevant()}"

    async def _ask(self, body: Body, heard: Heard) -> None:
        await hear(self._client, body, heard, time.monotonic)

    async def _scrape(self) -> Scrape:
        response = await self._client.get("/metrics")
        response.raise_for_status()
        return parse(response.text)


def _by_front(scrape: Scrape) -> float:
    return scrape.value("baton_requests_total", endpoint="completions")
