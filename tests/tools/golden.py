"""Right answers: what one colocated worker says, alone in this process and asked one at a time.

All of it is real but Ray and sockets: the engine, Front and its HTTP application.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from configs.load import load
from deployments.front import Routing
from deployments.front_service import FrontService, FrontSettings, Sources
from deployments.http_app import build_app
from deployments.metrics import FrontMetrics, WorkerSnapshot
from deployments.resume import ResumeConfig, ResumingBackend
from deployments.served_model import read_served_model
from kv_transfer.authentication import Secret
from router.fixed import FixedPolicy
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from workers.assembly import build_decode_worker
from workers.decode import DecodeWorker
from workers.messages import GenerateRequest, WorkerEvent

__all__ = ["Answer", "colocated_client", "golden_answers", "golden_texts", "greedy_or_sampled"]

_POOL = "local"
_HANG_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request is to be answered, token by token: other tokens may have the same text."""

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    """As the server counts them: one more where an end token, which it does not show, came last."""

    def is_that_of(self, heard: Heard) -> bool:
        """Whether this is what a client has heard, to the end."""
        said = (heard.text, tuple(heard.token_ids), heard.num_tokens)
        return said == (self.text, self.token_ids, self.num_tokens)

    def begins_as(self, heard: Heard) -> bool:
        """Whether this goes on from what a client has heard, which may be nothing."""
        same_ids = self.token_ids[: len(heard.token_ids)] == tuple(heard.token_ids)
        return same_ids and self.text.startswith(heard.text)


def greedy_or_sampled(number: int) -> dict[str, float]:
    """The fields of every other request that decide how its tokens are chosen.

    Sampled ones keep 20 tokens: a tiny random model finds all of a vocabulary about as likely, and
    that fp32's rounding, another one in another batch, turns a draw is then least unlikely.
    """
    return {"temperature": 0.8, "top_k": 20} if number % 2 else {"temperature": 0}


class _OneWorker:
    """A `WorkerPool` of one worker in this process."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        return self._worker.generate(request)

    async def is_ready(self) -> bool:
        return self._worker.healthy


@asynccontextmanager
async def colocated_client(overrides: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a worker and a Front in this process; streams come in one piece."""
    settings = load("colocated", environ=os.environ, overrides=overrides)
    worker = build_decode_worker(
        settings, worker_id="golden", environ=os.environ, prefill=None, secret=Secret.fresh()
    )
    await worker.start()
    backend = ResumingBackend(
        _OneWorker(worker),
        ResumeConfig(silence_s=_HANG_S),
        clock=time.monotonic,
        on_loss=lambda _: None,
    )
    front = FrontService(
        models=[read_served_model(settings, os.environ)],
        backends={_POOL: backend},
        policy=Routing(FixedPolicy(_POOL)),
        settings=FrontSettings(version="golden"),
        metrics=FrontMetrics("golden"),
        sources=Sources(clock=time.monotonic, wall_clock=time.time, rng=random.Random(0)),
        peer_snapshots=_no_peers,
    )
    transport = httpx.ASGITransport(build_app(front))
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://golden", timeout=_HANG_S
        ) as client:
            yield client
    finally:
        await worker.stop()


async def _no_peers() -> Sequence[WorkerSnapshot]:
    return ()


async def golden_texts(overrides: Sequence[str], bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    """As `golden_answers`, the texts alone."""
    return [answer.text for answer in await golden_answers(overrides, bodies)]


async def golden_answers(
    overrides: Sequence[str], bodies: Sequence[Mapping[str, Any]]
) -> list[Answer]:
    """Each request's one choice, in order; AssertionError if one has none.

    Each is asked under a salt of its own, so that none is made of another one's KV.
    """
    answers = []
    async with colocated_client(overrides) as client:
        for number, body in enumerate(bodies):
            heard = Heard()
            asked = {**body, **TOKEN_IDS, "cache_salt": f"golden-{number}"}
            await hear(client, asked, heard, time.monotonic)
            assert heard.ending == "finished", heard
            assert heard.num_tokens is not None, heard
            answers.append(
                Answer(
                    text=heard.text,
                    token_ids=tuple(heard.token_ids),
                    num_tokens=heard.num_tokens,
                )
            )
    return answers
