"""Log-probabilities of a prompt over HTTP: cold, warm, split and colocated give the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.tools.baton_server import MODEL, BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (12, 600)
"""The longer one is computed by prefill where there is one, in several chunks."""
NUM_TOP = 3
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def colocated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatonServer]:
    directory = tmp_path_factory.mktemp("colocated")
    with BatonServer.started(directory, more=("prefill=null",)) as server:
        yield server


def complete(server: BatonServer, prompt: list[int], **fields: object) -> Mapping[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body | fields, timeout=300)
    response.raise_for_status()
    server.wait_for(lambda scrape: not scrape.held(), timeout_s=60, what="nothing is held")
    answer: Mapping[str, Any] = response.json()
    return answer


def scores(answer: Mapping[str, Any]) -> list[dict[str, float]]:
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


def differing(one: list[dict[str, float]], other: list[dict[str, float]]) -> list[int]:
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


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_is_scored_alike_cold_warm_split_and_colocated(
    baton_server: BatonServer, colocated_server: BatonServer, length: int
) -> None:
    prompt = [3000 + 7 * place % 20_000 for place in range(length)]
    answers = {}
    for name, server in (("split", baton_server), ("colocated", colocated_server)):
        cold = complete(server, prompt, prompt_logprobs=NUM_TOP)
        found = complete(server, prompt)  # shows that what the next one could find is there
        warm = complete(server, prompt, prompt_logprobs=NUM_TOP)
        assert cached_tokens(found) == (length - 1) // 16 * 16
        assert cached_tokens(warm) == 0  # a scored prompt needs all of its rows
        answers[name] = scores(cold), scores(warm)
        (choice,) = found["choices"]
        assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(
            answers[name][0][-1]["output"], abs=TOLERANCE
        )

    cold, warm = answers["split"]
    assert len(cold) == length
    assert differing(cold, warm) == []
    for other in answers["colocated"]:
        assert differing(cold, other) == []
