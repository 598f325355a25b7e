"""A server whose KV moves over NIXL, as its user starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.cluster.listeners import wide_listeners
from tests.fakes.stream_kinds import needs_nixl
from tests.tools.asking import ask, make_client
from tests.tools.baton_server import COLOCATED_SETTINGS, MODEL, BatonServer
from tests.tools.golden import golden_texts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_nixl,
]

NUM_PROMPT_TOKENS = 900


async def test_a_text_over_nixl_is_that_of_one_worker_alone(tmp_path: Path) -> None:
    body = {
        "model": MODEL,
        "prompt": [300 + 7 * index for index in range(NUM_PROMPT_TOKENS)],
        "max_tokens": 16,
        "temperature": 0,
    }
    (expected,) = await golden_texts(COLOCATED_SETTINGS, [body])
    with BatonServer.started(tmp_path, more=["transfer.transport=nixl"]) as server:
        async with make_client(server.base_url, timeout_s=180) as client:
            ending = await ask(client, body)
        after = await asyncio.to_thread(server.wait_until_idle)
        link = {"peer": "prefill-0", "transport": "nixl", "reason": "only_one"}
        assert after.value("baton_link_info", role="decode", **link) == 1
        assert after.value("baton_transfers_total", outcome="landed") == 1
        assert wide_listeners(server.pid) == []
    assert ending.is_whole
    assert ending.text == expected != ""
