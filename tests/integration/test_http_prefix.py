"""A prompt that was asked before, told by `usage` and `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.tools.baton_server import MODEL, BatonServer
from tests.tools.scrape import Scrape

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = 600
BLOCK_TOKENS = 16
HIT = 592
"""Of 600 tokens: 37 whole blocks."""


def complete(server: BatonServer, start: int, **fields: object) -> Mapping[str, Any]:
    """A greedy completion; another start gives a prompt that begins otherwise."""
    prompt = [start + 3 * index % 20_000 for index in range(LONG)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=180)
    response.raise_for_status()
    answer: Mapping[str, Any] = response.json()
    return answer


def cached_tokens(answer: Mapping[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def computed(before: Scrape, after: Scrape) -> float:
    name = "baton_computed_prompt_tokens_total"
    return after.value(name) - before.value(name)


def test_second_identical_prompt_is_found(baton_server: BatonServer) -> None:
    start = baton_server.wait_until_idle()
    cold = complete(baton_server, 500)
    between = baton_server.wait_until_idle()
    warm = complete(baton_server, 500)
    end = baton_server.wait_until_idle()

    assert (cached_tokens(cold), cached_tokens(warm)) == (0, HIT)
    assert computed(start, between) == LONG
    assert computed(between, end) == LONG - HIT
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert end.blocks("decode", "cached") >= HIT / BLOCK_TOKENS
    hits = "baton_prefix_hit_tokens_total"
    assert end.value(hits, role="decode") - between.value(hits, role="decode") == HIT


def test_another_salt_finds_nothing(baton_server: BatonServer) -> None:
    first = complete(baton_server, 700, cache_salt="tenant-a")
    other = complete(baton_server, 700, cache_salt="tenant-b")
    same = complete(baton_server, 700, cache_salt="tenant-a")

    assert list(map(cached_tokens, (first, other, same))) == [0, 0, HIT]
    assert "tenant-" not in httpx.get(f"{baton_server.base_url}/metrics", timeout=10).text


def test_stop_string_that_ends_the_answer_leaves_the_count(baton_server: BatonServer) -> None:
    text = complete(baton_server, 900)["choices"][0]["text"]
    stopped = complete(baton_server, 900, stop=text[:1])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert cached_tokens(stopped) == HIT
