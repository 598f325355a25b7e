"""Load, faults, clients that leave and pools that are always full; then silence, and the sums.

Every prompt has one right answer, token by token, whatever happens to the workers that make it:
greedy or sampled with a seed, in fp32. A client that is answered anything else, part of an answer
included, is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.tools.baton_server import BatonServer
from tests.tools.faults import FAULTY_SETTINGS, Faults
from tests.tools.golden import Answer, golden_answers, greedy_or_sampled
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from tests.tools.scrape import Scrape

__all__ = [
    "Ask",
    "ChaosConfig",
    "ChaosReport",
    "Crowd",
    "chaos_settings",
    "is_quiet",
    "make_asks",
    "run_chaos",
]

REQUEST_TIMEOUT_S = 60.0
HANG_S = REQUEST_TIMEOUT_S + 30.0
QUIET_S = 180.0
"""Restarts included."""
AFTER_FAILURE_S = 0.2
REPLICAS = 2
_ROLES = ("decode", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """How much of it."""

    seed: int
    seconds: float
    """Then nothing more goes wrong, and clients finish what they have begun."""
    window: int
    """Tokens; every pool holds two."""
    num_asks: int = 48
    num_clients: int = 12
    max_output_tokens: int = 48
    fault_every_s: float = 2.0
    num_decks: int | None = None
    """End after each fault has come up so often, if that is before the time is up."""
    leaving: float = 0.25
    """Part of the clients that leave within `stays_s`."""
    stays_s: float = 1.5
    progress: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A tenant's request, and the only right answer to it."""

    body: dict[str, Any]
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """What it has shown."""

    seed: int
    num_requests: int
    endings: Counter[str]
    """By `left`, `finished`, `failed <code>`; each request is in one."""
    wrong: list[str]
    faults: Counter[str]
    lost_attempts: float
    """That Front gave up and went on with elsewhere."""
    counted_by_front: float
    """Requests that Front says have ended."""
    last: Scrape
    """Of the quiet server."""

    @property
    def is_clean(self) -> bool:
        """Answers and no wrong token, nothing held, every request ended once, here and at Front."""
        reached_front = self.num_requests - self.endings["left"]
        return (
            self.endings["finished"] > 0  # else no whole answer was compared
            and not self.wrong
            and not self.last.held()
            and self.endings.total() == self.num_requests
            and reached_front <= self.counted_by_front <= self.num_requests
        )

    def lines(self) -> list[str]:
        """The figures, for who reads them."""
        served = self.last.by_label("baton_transfers_total", "outcome")
        return [
            f"seed {self.seed}: {self.num_requests} requests, {dict(sorted(self.endings.items()))}",
            f"faults: {dict(sorted(self.faults.items()))}",
            f"attempts that Front gave up and went on with: {self.lost_attempts:g}",
            f"transfers of the workers that are left: {served}",
            f"requests that Front counted: {self.counted_by_front:g}",
            f"held at the end: {self.last.held() or 'nothing'}",
            f"wrong answers: {len(self.wrong)} {self.wrong[:3] if self.wrong else ''}",
            "CLEAN" if self.is_clean else "NOT CLEAN",
        ]


def chaos_settings(model: str, *, window: int, transport: str) -> tuple[str, ...]:
    """Of a server for `run_chaos`: fp32, pools of two windows, and hand-offs of all but little."""
    pools = [f"{role}.engine.pool_tokens={2 * window}" for role in _ROLES]
    threads = [f"{role}.engine.threads=1" for role in _ROLES]
    return (
        f"model.source={model}",
        "model.name=served",
        "model.dtype=fp32",
        f"model.max_model_len={window}",
        "decode.local_prefill_tokens=16",
        "prefill.engine.prefill_chunk_tokens=64",
        f"transfer.transport={transport}",
        *pools,
        *threads,
        *FAULTY_SETTINGS,
    )


async def make_asks(model: str, config: ChaosConfig) -> list[Ask]:
    """Tenants with equal beginnings; prompts of all lengths; greedy and sampled."""
    rng = random.Random(config.seed)
    bodies = [_body(rng, config, number) for number in range(config.num_asks)]
    overrides = (
        f"model.source={model}",
        "model.name=served",
        "model.dtype=fp32",
        f"model.max_model_len={config.window}",
        "decode.engine.threads=1",
    )
    answers = await golden_answers(overrides, bodies)
    return [Ask(body=body, answer=answer) for body, answer in zip(bodies, answers, strict=True)]


def _body(rng: random.Random, config: ChaosConfig, number: int) -> dict[str, Any]:
    shared = [300 + index for index in range(config.window // 4)]
    begins_alike = shared if rng.random() < 0.6 else []
    room = config.window - config.max_output_tokens - len(begins_alike)
    own = [rng.randrange(300, 20_000) for _ in range(rng.randint(1, room))]
    return {
        "model": "served",
        "prompt": begins_alike + own,
        "max_tokens": rng.randint(1, config.max_output_tokens),
        **greedy_or_sampled(number),
        "seed": number,
        "ignore_eos": True,
        "cache_salt": f"tenant-{number % 3}",
        **TOKEN_IDS,
    }


async def run_chaos(server: BatonServer, asks: Sequence[Ask], config: ChaosConfig) -> ChaosReport:
    """Load the server while things go wrong; returns once it is quiet.

    AssertionError if it does not get quiet, with what is held; TimeoutError if a client is kept
    waiting beyond its request's deadline.
    """
    before = _by_front(await asyncio.to_thread(server.scrape))
    faults = Faults(server, random.Random(f"{config.seed} faults"), every_s=config.fault_every_s)
    async with httpx.AsyncClient(
        base_url=server.base_url,
        timeout=HANG_S,
        # A connection for each request: one that is kept may close just when it is used again.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"x-request-timeout-seconds": str(REQUEST_TIMEOUT_S)},
    ) as client:
        crowd = Crowd(client, asks, config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(crowd.run())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.seconds):
                    await faults.run(config.num_decks)
            crowd.close()
    last = await asyncio.to_thread(server.wait_for, is_quiet, timeout_s=QUIET_S, what="quiet")
    return ChaosReport(
        seed=config.seed,
        num_requests=crowd.num_requests,
        endings=crowd.endings,
        wrong=crowd.wrong,
        faults=faults.done,
        lost_attempts=last.value("baton_lost_attempts_total"),
        counted_by_front=_by_front(last) - before,
        last=last,
    )


def is_quiet(scrape: Scrape) -> bool:
    """Whether all workers answer, those that came back included, and nothing is held."""
    return scrape.is_idle() and all(len(scrape.workers(role)) == REPLICAS for role in _ROLES)


def _by_front(scrape: Scrape) -> float:
    return scrape.value("baton_requests_total", endpoint="completions")


class Crowd:
    """The clients, each of which asks one thing after the other."""

    def __init__(self, client: httpx.AsyncClient, asks: Sequence[Ask], config: ChaosConfig) -> None:
        self._client = client
        self._asks = asks
        self._config = config
        self._is_closing = False
        self.num_requests = 0
        self.endings: Counter[str] = Counter()
        self.wrong: list[str] = []

    def close(self) -> None:
        """Let each client finish what it has begun."""
        self._is_closing = True

    async def run(self) -> None:
        """Until it is closed and the last one is answered."""
        async with asyncio.TaskGroup() as clients:
            telling = asyncio.create_task(self._tell())
            try:
                tasks = [
                    clients.create_task(self._one_client(number))
                    for number in range(self._config.num_clients)
                ]
                await asyncio.gather(*tasks)
            finally:
                telling.cancel()

    async def _tell(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(10)
            self._config.progress(
                f"{time.monotonic() - started:6.0f} s: {dict(sorted(self.endings.items()))}, "
                f"{len(self.wrong)} wrong"
            )

    async def _one_client(self, number: int) -> None:
        rng = random.Random(f"{self._config.seed} client {number}")
        while not self._is_closing:
            ask = rng.choice(self._asks)
            body = {**ask.body, "stream": rng.random() < 0.6}
            leaves_after = None
            if rng.random() < self._config.leaving:
                leaves_after = rng.uniform(0, self._config.stays_s)
            await self._one_request(ask, body, leaves_after)

    async def _one_request(
        self, ask: Ask, body: dict[str, Any], leaves_after: float | None
    ) -> None:
        self.num_requests += 1
        heard = Heard()
        try:
            async with asyncio.timeout(HANG_S if leaves_after is None else leaves_after):
                await hear(self._client, body, heard, time.monotonic)
        except TimeoutError:
            if leaves_after is None:
                raise  # forgotten
            ending = "left"
        except httpx.TransportError as error:
            ending = f"broken {type(error).__name__}"
        else:
            ending = heard.ending
        self.endings[ending] += 1
        self._judge(ask, body, heard, ending)
        if ending.startswith("failed"):
            await asyncio.sleep(AFTER_FAILURE_S)  # as a client would, before it tries again

    def _judge(self, ask: Ask, body: dict[str, Any], heard: Heard, ending: str) -> None:
        if ending == "finished":
            is_right = ask.answer.is_that_of(heard)
        else:
            is_right = ask.answer.begins_as(heard)
        if not is_right or ending.startswith("broken"):
            what = {key: body[key] for key in ("seed", "temperature", "stream", "max_tokens")}
            self.wrong.append(f"{ending}: {heard}, not {ask.answer}; {what}")
