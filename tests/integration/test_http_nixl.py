"""A server whose KV moves over NIXL, as its user starts it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployments.cluster.listeners import wide_listeners
from tests.fakes.stream_kinds import needs_nixl
from tests.tools.baton_server import MODEL, WINDOW, BatonServer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_nixl,
]

NUM_PROMPT_TOKENS = 900


def text_of(server: BatonServer) -> str:
    """A long prompt's continuation."""
    body = {
        "model": MODEL,
        "prompt": [300 + 7 * index for index in range(NUM_PROMPT_TOKENS)],
        "max_tokens": 16,
        "temperature": 0,
    }
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=180)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def test_a_text_over_nixl_is_that_of_one_worker_alone(tmp_path: Path) -> None:
    with BatonServer.started(tmp_path, more=["transfer.transport=nixl"]) as server:
        text = text_of(server)
        after = server.wait_until_idle()
        link = {"peer": "prefill-0", "transport": "nixl", "reason": "only_one"}
        assert after.value("baton_link_info", role="decode", **link) == 1
        assert after.value("baton_transfers_total", outcome="landed") == 1
        assert wide_listeners(server.pid) == []
    with BatonServer.started(tmp_path, more=[f"decode.local_prefill_tokens={WINDOW}"]) as alone:
        assert text_of(alone) == text
        assert alone.wait_until_idle().value("baton_transfers_total") == 0
