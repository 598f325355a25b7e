"""Nothing of one tenant reaches another: abort storms, restarts, full pools, equal beginnings.

`BATON_CANARY_REQUESTS` makes it longer, `BATON_CANARY_SEED` another one.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.fakes.paged_model import paged
from tests.fakes.stream_kinds import SHM, TCP
from tests.fakes.tiny_models import SERVED, layout_of, make_model
from tests.fakes.worker_rig import worker_rig
from tests.leak import guards
from tests.leak.scenes import BLOCK_SIZE
from tests.leak.storm import CONFIG, Storm, make_asks

NUM_REQUESTS = int(os.environ.get("BATON_CANARY_REQUESTS", "160"))
SEED = int(os.environ.get("BATON_CANARY_SEED", "7"))
RESTART_EVERY = 20


@pytest.fixture(scope="module")
def model():
    return make_model("llama", SERVED["llama"])


@pytest.fixture(scope="module")
def asks(model):
    return make_asks(model, SEED)


async def storm(model, asks, kind, num_requests):
    layout = layout_of(model, block_size=BLOCK_SIZE)
    async with worker_rig(
        replace(CONFIG, layout=layout),
        model=paged(model, layout, shared=True),
        transport=kind.transport(),
        another=kind.transport,
    ) as rig:
        report = await Storm(rig, asks, SEED).run(num_requests, restart_every=RESTART_EVERY)
    shown = replace(report, wrong=report.wrong[:3])
    print(f"seed={SEED} requests={num_requests} transport={kind.name} {shown}")
    return report


@pytest.mark.timeout(60 + NUM_REQUESTS)
@pytest.mark.parametrize("kind", [TCP, SHM], ids=lambda kind: kind.name)
async def test_no_answer_has_anything_of_another_tenant(model, asks, kind):
    report = await storm(model, asks, kind, NUM_REQUESTS)

    assert report.wrong == []
    assert report.outcomes["restarts"] == NUM_REQUESTS // RESTART_EVERY
    assert min(report.outcomes["left"], report.outcomes["finished"]) > NUM_REQUESTS // 8
    assert min(report.found_tokens, report.evicted_blocks) > 0


@pytest.mark.timeout(120)
async def test_a_leak_would_be_seen(model, asks, monkeypatch):
    """Without salt and tokens in the keys of the prefix cache, tenants get each other's KV."""
    guards.SALT.replace(monkeypatch)
    guards.TOKENS.replace(monkeypatch)

    assert (await storm(model, asks, TCP, 40)).wrong != []
