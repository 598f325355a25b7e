"""The presets with several workers of a role, served as their users do, with another model.

Shown of each is what it promises: which prompts are handed over, between which workers, and that no
answer tells; also where the roles have blocks of different sizes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.schema import DecodeSettings
from tests.tools.baton_server import BatonServer
from tests.tools.golden import Answer, golden_answers, greedy_or_sampled
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from tests.tools.scrape import Scrape
from tests.tools.tiny_model import make_tiny_model
from workers.models.errors import ModelNotFoundError

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(700)]

FLOOR = DecodeSettings().local_prefill_tokens
NUM_LONG, NUM_SHORT = 32, 8
MAX_ROUNDS = 40
"""Of less than a second each. Front sends nothing to a decode worker that it has just heard of, and
who computes what is a matter of load: so all is asked again until everything was seen once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a preset is for."""

    preset: str
    num_prefill: int
    reasons: frozenset[tuple[str, str]]
    """Every place and reason that its prompts have, and no other."""
    hands_over_all: bool
    """That are above the floor."""
    changes: tuple[str, ...] = ()
    """Settings of it that are others here."""

    @property
    def label(self) -> str:
        """As which a test of it is known."""
        return " ".join((self.preset, *self.changes))

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Decode and prefill workers that are linked in the end: each with each."""
        return set(product(DECODE, self.prefill))

    @property
    def prefill(self) -> set[str]:
        """By name."""
        return {f"prefill-{number}" for number in range(self.num_prefill)}


DECODE = {"decode-0", "decode-1"}
MIXED = Promise(
    preset="mixed",
    num_prefill=1,
    reasons=frozenset(
        {("local", "short"), ("local", "cheaper"), ("remote", "cheaper"), ("remote", "unmeasured")}
    ),
    hands_over_all=False,
)
SPLIT = Promise(
    preset="split-2p2d",
    num_prefill=2,
    reasons=frozenset({("local", "short"), ("remote", "setting")}),
    hands_over_all=True,
)
REPACKED = replace(SPLIT, changes=("prefill.block_size=24",))
"""Decode's blocks have 16 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model and what is asked of it."""

    settings: Sequence[str]
    bodies: Sequence[dict[str, Any]]
    """Short prompts and long ones; no two begin alike."""
    answers: Sequence[Answer]

    def prompt_tokens(self, *, is_long: bool) -> int:
        """Of all prompts above the floor, or of all others."""
        lengths = [len(body["prompt"]) for body in self.bodies]
        return sum(length for length in lengths if (length > FLOOR) is is_long)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A small model, and what one worker of it answers."""
    try:
        model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    # In fp32 no token depends on what else is in its batch.
    settings = (f"model.source={model}", "model.name=served", "model.dtype=fp32")
    bodies = make_bodies(random.Random(4))
    answers = asyncio.run(golden_answers(settings, bodies))
    return Asked(settings=settings, bodies=bodies, answers=answers)


def make_bodies(rng: random.Random) -> list[dict[str, Any]]:
    lengths = [rng.randint(FLOOR + 1, 1000) for _ in range(NUM_LONG)]
    lengths += [rng.randint(1, FLOOR) for _ in range(NUM_SHORT)]
    return [
        {
            "model": "served",
            "prompt": rng.choices(range(300, 20_000), k=length),
            "max_tokens": 8,
            "seed": number,
            "ignore_eos": True,
            **greedy_or_sampled(number),
            **TOKEN_IDS,
        }
        for number, length in enumerate(lengths)
    ]


async def ask_together(server: BatonServer, bodies: Sequence[dict[str, Any]]) -> list[Heard]:
    """Ask all at once; each under a salt of its own, so that nothing is found of an earlier one."""
    heard = [Heard() for _ in bodies]
    started = time.monotonic_ns()
    async with httpx.AsyncClient(
        base_url=server.base_url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:
        await asyncio.gather(
            *(
                hear(client, {**body, "cache_salt": f"{started}-{number}"}, ear, time.monotonic)
                for number, (body, ear) in enumerate(zip(bodies, heard, strict=True))
            )
        )
    return heard


def links(scrape: Scrape) -> set[tuple[str, str]]:
    """Decode workers, and the prefill workers that they have a link to over shared memory."""
    return {
        (worker, peer)
        for worker, peer in product(scrape.workers("decode"), scrape.workers("prefill"))
        if scrape.value("baton_link_info", worker=worker, peer=peer, transport="shm") == 1
    }


def reasons(scrape: Scrape) -> set[tuple[str, str]]:
    """The places and reasons that prompts had."""
    return {
        (place, reason)
        for place in scrape.by_label("baton_prompts_placed_total", "place")
        for reason in scrape.by_label("baton_prompts_placed_total", "reason")
        if scrape.value("baton_prompts_placed_total", place=place, reason=reason)
    }


def shows_all(scrape: Scrape, promise: Promise) -> bool:
    """Whether nothing is left to be seen, or something was that no further round takes back."""
    seen = reasons(scrape)
    return not seen <= promise.reasons or (links(scrape), seen) == (promise.pairs, promise.reasons)


@pytest.fixture(params=[MIXED, SPLIT, REPACKED], ids=lambda promise: promise.label)
def promise(request: pytest.FixtureRequest) -> Promise:
    found: Promise = request.param
    return found


@pytest.fixture
def server(promise: Promise, asked: Asked, tmp_path: Path) -> Iterator[BatonServer]:
    """With all of its workers: it takes requests before the last one has come."""
    settings = (*asked.settings, *promise.changes)
    with BatonServer.started(tmp_path, preset=promise.preset, settings=settings) as server:
        server.wait_for(
            lambda seen: (
                (seen.workers("decode"), seen.workers("prefill")) == (DECODE, promise.prefill)
            ),
            timeout_s=120,
            what="all workers are there",
        )
        yield server


async def test_prompts_go_from_each_prefill_to_each_decode_worker_as_the_preset_promises(
    promise: Promise, server: BatonServer, asked: Asked
) -> None:
    rounds, last = 0, None
    while rounds < MAX_ROUNDS and (last is None or not shows_all(last, promise)):
        heard = await ask_together(server, asked.bodies)
        rounds += 1
        assert [ear.ending for ear in heard] == ["finished"] * len(heard)
        wrong = [n for n, ear in enumerate(heard) if not asked.answers[n].is_that_of(ear)]
        assert wrong == []
        last = await asyncio.to_thread(server.wait_until_idle)

    assert last is not None
    assert links(last) == promise.pairs
    assert reasons(last) == promise.reasons, last.by_label("baton_handoff_failures_total", "error")
    assert last.value("baton_prompts_placed_total", reason="short") == rounds * NUM_SHORT
    remote = last.value("baton_prompts_placed_total", place="remote")
    for name in ("baton_transfers_total", "baton_confirms_total"):
        assert last.value(name) == remote
    assert last.value("baton_transfers_total", outcome="landed") == remote
    assert last.value("baton_confirms_total", verdict="valid") == remote

    def computed(**labels: str) -> float:
        return last.value("baton_computed_prompt_tokens_total", **labels)

    short, long = (rounds * asked.prompt_tokens(is_long=is_long) for is_long in (False, True))
    assert computed() == short + long  # each once, wherever it was
    assert all(computed(worker=worker) > 0 for worker in promise.prefill)
    assert (computed(role="prefill") == long) is promise.hands_over_all
