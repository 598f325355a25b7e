"""Where prompts are computed and what moves, told by `/metrics` before and after one request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.tools.asking import ask, make_client, story_request
from tests.tools.baton_server import MODEL, BatonServer
from tests.tools.scrape import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = 1500
BLOCK_TOKENS = 16
LAYERS, KV_HEADS, HEAD_DIM, FP32_BYTES = 30, 3, 64, 4  # of the model
BYTES_PER_BLOCK = LAYERS * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * FP32_BYTES


def complete(server: BatonServer, num_prompt_tokens: int, **fields: object) -> Mapping[str, Any]:
    prompt = [300 + 7 * index % 20_000 for index in range(num_prompt_tokens)]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        # What is found is computed nowhere and does not move: every request here is the first.
        "cache_salt": uuid.uuid4().hex,
        **fields,
    }
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=180)
    response.raise_for_status()
    answer: Mapping[str, Any] = response.json()
    return answer


def grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


def test_a_long_prompt_is_computed_on_prefill_and_its_blocks_move(
    baton_server: BatonServer,
) -> None:
    before = baton_server.wait_until_idle()
    answer = complete(baton_server, LONG)
    after = baton_server.wait_until_idle()

    def delta(name: str, **labels: str) -> float:
        return grown(before, after, name, **labels)

    assert answer["usage"]["prompt_tokens"] == LONG
    assert answer["usage"]["completion_tokens"] == 4
    assert delta("baton_computed_prompt_tokens_total", role="prefill") == LONG
    assert delta("baton_computed_prompt_tokens_total", role="decode") == 0
    assert delta("baton_prompts_placed_total", place="remote") == 1
    num_blocks = -(-LONG // BLOCK_TOKENS)
    for direction in ("sent", "received"):
        assert delta("baton_transfer_blocks_total", direction=direction) == num_blocks
        assert delta("baton_transfer_bytes_total", direction=direction, transport="shm") == (
            num_blocks * BYTES_PER_BLOCK
        )
    link = {"peer": "prefill-0", "transport": "shm", "reason": "same_host"}
    assert after.value("baton_link_info", role="decode", **link) == 1
    assert delta("baton_digests_checked_total") == num_blocks
    assert delta("baton_transfers_total", outcome="landed") == 1
    assert delta("baton_transfers_total") == 1
    assert delta("baton_confirms_total", verdict="valid") == 1
    assert delta("baton_confirms_total") == 1
    assert delta("baton_leases_ended_total", reason="confirmed") == 1


def test_the_first_token_is_prefills(baton_server: BatonServer) -> None:
    """With one token to generate, decode has nothing to compute at all."""
    before = baton_server.wait_until_idle()
    first = complete(baton_server, 200, max_tokens=1)
    after = baton_server.wait_until_idle()
    whole = complete(baton_server, 200, max_tokens=4)

    assert first["choices"][0]["text"] != ""
    assert whole["choices"][0]["text"].startswith(first["choices"][0]["text"])
    assert grown(before, after, "baton_steps_total", role="decode") == 0
    assert grown(before, after, "baton_output_tokens_total", role="decode") == 1
    assert grown(before, after, "baton_output_tokens_total", role="prefill") == 1


def test_a_short_prompt_is_computed_on_decode_and_nothing_moves(baton_server: BatonServer) -> None:
    before = baton_server.wait_until_idle()
    answer = complete(baton_server, 40)
    after = baton_server.wait_until_idle()

    assert answer["usage"]["prompt_tokens"] == 40
    assert grown(before, after, "baton_computed_prompt_tokens_total", role="decode") == 40
    assert grown(before, after, "baton_computed_prompt_tokens_total", role="prefill") == 0
    assert grown(before, after, "baton_prompts_placed_total", place="local") == 1
    assert grown(before, after, "baton_transfer_bytes_total") == 0
    assert grown(before, after, "baton_leases_opened_total") == 0


def test_the_page_of_models_and_the_metrics_say_alike_how_each_worker_runs_it(
    baton_server: BatonServer,
) -> None:
    seen = baton_server.wait_until_idle()
    response = httpx.get(f"{baton_server.base_url}/v1/models/{MODEL}", timeout=30)
    shown = response.raise_for_status().json()["baton"]

    assert shown["runner_source"] == "workers"
    (runner,) = shown["runners"]
    assert runner["workers"] == ["decode-0", "prefill-0"]
    for worker in runner["workers"]:
        labels = {"tier": runner["runner"], "cause": runner["runner_cause"], "worker": worker}
        assert seen.value("baton_runner_info", **labels) == 1


async def test_a_text_does_not_depend_on_what_else_is_served(baton_server: BatonServer) -> None:
    """INV-SAME: alone, and in whatever batches two of each at once make."""
    async with make_client(baton_server.base_url, timeout_s=120) as client:
        requests = [story_request(number) for number in range(8)]
        alone = [await ask(client, request) for request in requests]
        together = await asyncio.gather(*(ask(client, request) for request in requests * 2))

    assert all(ending.is_whole for ending in alone)
    assert [ending.text for ending in together] == [ending.text for ending in alone] * 2
