"""A server whose KV moves over process groups says what a colocated one says."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.tools.baton_server import MODEL, BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = 700


def texts(server: BatonServer) -> list[str]:
    """What follows two prompts, each too long to be prefilled on decode."""
    found = []
    for seed in (300, 900):
        body = {
            "model": MODEL,
            "prompt": [seed + 7 * index % 20_000 for index in range(LONG)],
            "max_tokens": 12,
            "temperature": 0,
        }
        response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=180)
        response.raise_for_status()
        found.append(response.json()["choices"][0]["text"])
    return found


def test_texts_after_a_handoff_over_torch_equal_those_of_one_worker(tmp_path: Path) -> None:
    with BatonServer.started(tmp_path, more=["transfer.transport=torch"]) as split:
        handed_over = texts(split)
        seen = split.wait_until_idle()
    assert seen.value("baton_transfers_total", outcome="landed") == 2
    assert seen.value("baton_transfers_total") == 2
    assert seen.value("baton_transfer_bytes_total", direction="received", transport="torch") > 0
    link = {"peer": "prefill-0", "transport": "torch", "reason": "only_one"}
    assert seen.value("baton_link_info", role="decode", **link) == 1

    with BatonServer.started(tmp_path, preset="colocated") as one:
        assert texts(one) == handed_over
