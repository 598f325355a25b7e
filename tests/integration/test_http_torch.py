"""A server whose KV moves over process groups says what a colocated one says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.tools.asking import ask, make_client
from tests.tools.baton_server import COLOCATED_SETTINGS, MODEL, BatonServer
from tests.tools.golden import golden_texts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = 700


async def test_texts_after_a_handoff_over_torch_equal_those_of_one_worker(tmp_path: Path) -> None:
    """Two prompts, each too long to be prefilled on decode."""
    bodies = [
        {
            "model": MODEL,
            "prompt": [seed + 7 * index % 20_000 for index in range(LONG)],
            "max_tokens": 12,
            "temperature": 0,
        }
        for seed in (300, 900)
    ]
    expected = await golden_texts(COLOCATED_SETTINGS, bodies)
    with BatonServer.started(tmp_path, more=["transfer.transport=torch"]) as split:
        async with make_client(split.base_url, timeout_s=180) as client:
            endings = [await ask(client, body) for body in bodies]
        seen = await asyncio.to_thread(split.wait_until_idle)
    assert [ending.text for ending in endings] == expected
    assert seen.value("baton_transfers_total", outcome="landed") == 2
    assert seen.value("baton_transfers_total") == 2
    assert seen.value("baton_transfer_bytes_total", direction="received", transport="torch") > 0
    link = {"peer": "prefill-0", "transport": "torch", "reason": "only_one"}
    assert seen.value("baton_link_info", role="decode", **link) == 1
