"""What cannot fit is refused before it costs anything: requests by a server, pools by a start."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial

import httpx
import pytest

from configs.schema import HttpSettings, Settings
from deployments.serving import instance_directory
from tests.fakes.stream_kinds import SECRET
from tests.tools.baton_server import MODEL, WINDOW, BatonServer, baton_command, free_port
from workers.assembly import build_decode_worker, build_prefill_worker
from workers.errors import PoolTooSmallError

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = WINDOW - 1
COST = (
    "baton_steps_total",
    "baton_computed_prompt_tokens_total",
    "baton_transfers_total",
    "baton_leases_opened_total",
    "baton_prompts_placed_total",
    "baton_sequences_ended_total",
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"), [(WINDOW + 1, 16), (WINDOW, 1), (WINDOW - 15, 16)]
)
def test_a_request_beyond_the_window_is_refused_and_costs_nothing(
    baton_server: BatonServer, num_prompt_tokens: int, max_tokens: int, stream: bool
) -> None:
    """INV-ADMIT."""
    before = baton_server.wait_until_idle()
    body = {
        "model": MODEL,
        "prompt": [5] * num_prompt_tokens,
        "max_tokens": max_tokens,
        "stream": stream,
    }
    response = httpx.post(f"{baton_server.base_url}/v1/completions", json=body, timeout=60)
    after = baton_server.scrape()

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    numbers = {int(digits) for digits in re.findall(r"\d+", error["message"])}
    assert numbers >= {WINDOW, num_prompt_tokens, max_tokens}
    assert {name: after.value(name) for name in COST} == {name: before.value(name) for name in COST}
    assert after.held() == {}
    for role in ("decode", "prefill"):
        assert after.available(role) == before.available(role) > 0


def test_a_request_of_exactly_the_window_is_served(baton_server: BatonServer) -> None:
    """The refusals above are not one too early; the prompt is short, for its time."""
    body = {
        "model": MODEL,
        "prompt": [5] * 100,
        "max_tokens": WINDOW - 100,
        "temperature": 0,
        "stream": True,
    }
    url = f"{baton_server.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data: ")
    baton_server.wait_until_idle()  # leaving is enough to end it


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_pool_below_the_window_is_refused_before_anything_starts(
    baton_server: BatonServer, command: str, role: str
) -> None:
    """INV-POOL-WINDOW; the server is only there so that its model is."""
    port = free_port()
    overrides = {
        "model.max_model_len": WINDOW,
        f"{role}.engine.pool_tokens": SMALL,
        "http.port": port,
    }
    words = [word for item in overrides.items() for word in ("--set", "{}={}".format(*item))]
    ended = subprocess.run(
        [baton_command(), command, "local", *words], capture_output=True, text=True, timeout=120
    )

    assert ended.returncode == 1
    assert ended.stderr == (
        f"baton: INV-POOL-WINDOW: The {role} pool holds {SMALL} tokens, but one request may take "
        f"the window of {WINDOW}: size {role}.engine for at least {WINDOW} tokens or lower "
        "model.max_model_len.\n"
    )
    assert not instance_directory(Settings(http=HttpSettings(port=port)), os.environ).exists()


@pytest.mark.parametrize(
    ("role", "build"),
    [("decode", partial(build_decode_worker, prefill=None)), ("prefill", build_prefill_worker)],
)
def test_a_worker_with_a_pool_below_the_window_refuses_itself(
    baton_server: BatonServer, role: str, build: Callable[..., object]
) -> None:
    """INV-POOL-WINDOW once more, where a worker is started without `baton serve`."""
    settings = Settings.model_validate(
        {
            "model": {"max_model_len": WINDOW},
            "prefill": {},
            role: {"engine": {"pool_tokens": SMALL}},
        }
    )
    with pytest.raises(PoolTooSmallError, match=rf"{role} pool holds {SMALL} .*{WINDOW}"):
        build(settings, worker_id=f"{role}-0", environ=os.environ, secret=SECRET)
