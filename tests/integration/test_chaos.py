"""Workers that are killed, paused and cut off under load, on a server of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.baton_server import BatonServer
from tests.tools.chaos import ChaosConfig, chaos_settings, make_asks, run_chaos
from tests.tools.faults import can_cut
from tests.tools.tiny_model import make_tiny_model
from workers.models.errors import ModelNotFoundError

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

CONFIG = ChaosConfig(seed=4, seconds=15.0, window=512, num_asks=24, fault_every_s=1.0)
"""A whole deck of faults."""


async def test_no_token_is_wrong_and_nothing_is_left_after_chaos(tmp_path: Path) -> None:
    try:
        model = str(make_tiny_model(tmp_path))
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    asks = await make_asks(model, CONFIG)
    settings = chaos_settings(model, window=CONFIG.window, transport="auto")
    with BatonServer.started(tmp_path, preset="split-2p2d", settings=settings) as server:
        report = await run_chaos(server, asks, CONFIG)

    print("\n".join(report.lines()))
    assert report.wrong == []
    assert report.is_clean
    assert report.endings["finished"] > report.num_requests / 3
    expected = [f"{kind} {role}" for kind in ("kill", "pause") for role in ("Decode", "Prefill")]
    assert all(report.faults[fault] > 0 for fault in expected)
    assert report.faults["cut channel"] > 0 or not can_cut()
    assert report.lost_attempts > 0
