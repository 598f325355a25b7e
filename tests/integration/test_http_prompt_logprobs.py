"""Log-probabilities of a prompt over HTTP: cold, warm, split and colocated give the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.tools.asking import make_client
from tests.tools.baton_server import COLOCATED_SETTINGS, MODEL, BatonServer
from tests.tools.golden import colocated_client

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (12, 600)
"""The longer one is computed by prefill where there is one, in several chunks."""
NUM_TOP = 3
TOLERANCE = 1e-4

Scores = list[dict[str, float]]


async def complete(
    client: httpx.AsyncClient, prompt: list[int], **fields: object
) -> Mapping[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    response = await client.post("/v1/completions", json=body | fields)
    response.raise_for_status()
    answer: Mapping[str, Any] = response.json()
    return answer


def scores(answer: Mapping[str, Any]) -> Scores:
    """By place, the log-probability of each token that is named there; then of the output."""
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"][0] is None
    return [
        *(
            {token_id: entry["logprob"] for token_id, entry in place.items()}
            for place in choice["prompt_logprobs"][1:]
        ),
        {"output": choice["logprobs"]["token_logprobs"][0]},
    ]


def cached_tokens(answer: Mapping[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def differing(one: Scores, other: Scores) -> list[int]:
    """Places at which a token's log-probabilities differ, or one of them is in neither's top.

    Which tokens are named may differ by a tie at the end of the top.
    """
    assert len(one) == len(other)
    return [
        place
        for place, (first, second) in enumerate(zip(one, other, strict=True))
        if len(common := first.keys() & second.keys()) < min(len(first), len(second)) - 1
        or any(abs(first[each] - second[each]) > TOLERANCE for each in common)
    ]


async def cold_and_warm(client: httpx.AsyncClient, prompt: list[int]) -> list[Scores]:
    """Asked for the first time, and when all of the prompt could be found."""
    cold = await complete(client, prompt, prompt_logprobs=NUM_TOP)
    found = await complete(client, prompt)  # shows that what the next one could find is there
    warm = await complete(client, prompt, prompt_logprobs=NUM_TOP)
    assert cached_tokens(found) == (len(prompt) - 1) // 16 * 16
    assert cached_tokens(warm) == 0  # a scored prompt needs all of its rows
    (choice,) = found["choices"]
    first = scores(cold)
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(
        first[-1]["output"], abs=TOLERANCE
    )
    return [first, scores(warm)]


@pytest.mark.parametrize("length", LENGTHS)
async def test_prompt_is_scored_alike_cold_warm_split_and_colocated(
    baton_server: BatonServer, length: int
) -> None:
    prompt = [3000 + 7 * place % 20_000 for place in range(length)]
    async with make_client(baton_server.base_url, timeout_s=300) as client:
        cold, *others = await cold_and_warm(client, prompt)
    async with colocated_client(COLOCATED_SETTINGS) as client:
        others += await cold_and_warm(client, prompt)

    assert len(cold) == length
    assert [differing(cold, other) for other in others] == [[], [], []]
