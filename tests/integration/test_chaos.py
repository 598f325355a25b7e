"""Workers that are killed, paused and cut off under load, on a server of its own.

`python -m tests.bench.bench_chaos` is the same for as long as it is told.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.fakes.until import until
from tests.tools.baton_server import BatonServer
from tests.tools.chaos import Ask, ChaosConfig, Crowd, chaos_settings, make_asks, run_chaos
from tests.tools.faults import can_cut
from tests.tools.golden import colocated_client
from tests.tools.hearing import Heard
from tests.tools.tiny_model import make_tiny_model
from workers.models.errors import ModelNotFoundError

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

CONFIG = ChaosConfig(
    seed=4, seconds=120.0, num_decks=1, window=512, num_asks=24, num_clients=8, fault_every_s=1.0
)
"""Each fault once, which takes 15 s."""


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    try:
        return str(make_tiny_model(tmp_path))
    except ModelNotFoundError as error:
        pytest.skip(str(error))


async def test_no_token_is_wrong_and_nothing_is_left_after_chaos(
    tiny_model: str, tmp_path: Path
) -> None:
    asks = await make_asks(tiny_model, CONFIG)
    settings = chaos_settings(tiny_model, window=CONFIG.window, transport="auto")
    with BatonServer.started(tmp_path, preset="split-2p2d", settings=settings) as server:
        report = await run_chaos(server, asks, CONFIG)

    print("\n".join(report.lines()))
    assert report.wrong == []
    assert report.is_clean
    assert min(report.endings[ending] for ending in ("finished", "left")) > 0
    expected = [f"{kind} {role}" for kind in ("kill", "pause") for role in ("Decode", "Prefill")]
    assert all(report.faults[fault] > 0 for fault in expected)
    assert min(report.faults[f"cut {link}"] for link in ("channel", "kv")) > 0 or not can_cut()
    assert report.lost_attempts > 0


async def test_a_wrong_token_would_be_seen(tiny_model: str) -> None:
    config = replace(CONFIG, num_asks=2, num_clients=1, leaving=0.0)
    right, other = await make_asks(tiny_model, config)
    overrides = (f"model.source={tiny_model}", "model.name=served", "model.dtype=fp32")
    *first, last = right.answer.token_ids
    one_more = replace(right.answer, num_tokens=right.answer.num_tokens + 1)
    one_other = replace(right.answer, token_ids=(*first, last + 1))
    wrong = (other.answer, replace(right.answer, text=""), one_more, one_other)
    async with colocated_client(overrides) as client:
        crowds = [
            await one_answer(client, asked, config)
            for asked in (right, *(replace(right, answer=answer) for answer in wrong))
        ]

    assert all(crowd.endings["finished"] > 0 for crowd in crowds)
    assert [len(crowd.wrong) for crowd in crowds] == [
        0,
        *(crowd.num_requests for crowd in crowds[1:]),
    ]


async def one_answer(client: httpx.AsyncClient, asked: Ask, config: ChaosConfig) -> Crowd:
    crowd = Crowd(client, [asked], config)
    running = asyncio.create_task(crowd.run())
    await until(lambda: crowd.endings.total() > 0)
    crowd.close()
    await running
    return crowd


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"error": {"code": "a"}}, {"error": {"code": "a"}}],
        [{"choices": [{"text": "", "finish_reason": "length"}]}] * 2,
        [{"choices": [{"text": "", "finish_reason": "length"}]}, {"error": {"code": "a"}}],
    ],
    ids=["no end", "two errors", "two ends", "an end and an error"],
)
def test_a_request_that_does_not_end_once_is_broken(events: list[dict[str, object]]) -> None:
    heard = Heard(status=200)
    for event in events:
        heard.take(event, 0.0)
    heard.is_over = True

    assert heard.ending == "broken"
