"""What `/v1/models` says of how the model is run: what the workers say, as far as they have."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import RayError

import deployments.front
from deployments.decode import Decode
from deployments.front import Front
from deployments.front_service import FrontService
from deployments.metrics import WorkerSnapshot
from deployments.prefill import Prefill
from tests.fakes.backend import tokens_then_end
from tests.fakes.clock import FakeClock
from tests.fakes.front import MODEL, client_of, ids_of, make_codec, make_front
from tests.fakes.handle import FakeHandle, Reply, hanging
from tests.fakes.worker_rig import fake_model, worker_rig
from tests.tools.scrape import parse
from workers.runner_choice import RunnerChoice, runner_of

CONFIGURED = runner_of("llama")
OWN = {
    "runner": "llama_shaped",
    "runner_cause": "verified_family",
    "runner_reason": "llama is Llama-shaped",
}
GAVE_WAY = RunnerChoice(tier="stock", cause="own_differs", reason="layer 3 differs")
STOCK = {
    "runner": "stock",
    "runner_cause": "own_differs",
    "runner_reason": "layer 3 differs",
}
BY_CONFIGURATION = {**OWN, "runner_source": "configuration", "runners": []}


def worker(worker_id: str, runner: RunnerChoice | None) -> Reply:
    """A replica whose snapshot says how it runs the model."""
    snapshot = WorkerSnapshot(worker_id=worker_id, role="any", samples=(), runner=runner)

    async def answer() -> WorkerSnapshot:
        return snapshot

    return answer


def front_over(decode: FakeHandle, prefill: FakeHandle, clock: FakeClock) -> FrontService:
    """A Front that asks its workers as the deployment does, for a model of the family llama."""
    replica: Any = SimpleNamespace(_workers=[decode, prefill], _fronts=None, _front_id="front-0")
    front, _ = make_front(
        tokens_then_end(ids_of("x")),
        codec=make_codec(),
        card={"runner": CONFIGURED},
        peer_snapshots=partial(Front._peer_snapshots, replica),
        clock=clock,
    )
    return front


async def shown(client: httpx.AsyncClient) -> dict[str, Any]:
    """What is said of the one model, alone and in the list."""
    (listed,) = (await client.get("/v1/models")).raise_for_status().json()["data"]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed
    baton: dict[str, Any] = listed["baton"]
    return baton


async def test_workers_whose_own_decoder_gave_way_are_shown_so_and_the_metrics_agree():
    def gave_way(num_blocks):
        runner, memory = fake_model(num_blocks)
        runner.choice = GAVE_WAY
        return runner, memory

    async with worker_rig(model=gave_way) as rig:
        decode: Any = SimpleNamespace(_worker=rig.decode, _channel=SimpleNamespace(num_strangers=0))
        prefill: Any = SimpleNamespace(
            _worker=rig.prefill_workers[0], _door=SimpleNamespace(num_strangers=0)
        )
        front = front_over(
            FakeHandle([partial(Decode.snapshot, decode)]),
            FakeHandle([partial(Prefill.snapshot, prefill)]),
            FakeClock(),
        )
        async with client_of(front) as client:
            baton = await shown(client)
            metrics = parse((await client.get("/metrics")).text)

    workers = [rig.decode.me.worker_id, "prefill-0"]
    assert baton == {
        **STOCK,
        "runner_source": "workers",
        "runners": [{**STOCK, "workers": workers}],
    }
    for worker_id in workers:
        labels = {"worker": worker_id, "tier": "stock", "cause": "own_differs"}
        assert metrics.value("baton_runner_info", **labels) == 1


async def test_workers_that_differ_are_told_apart_and_the_first_decode_worker_is_shown():
    front = front_over(
        FakeHandle([worker("decode-1", CONFIGURED), worker("decode-0", GAVE_WAY)]),
        FakeHandle([worker("prefill-0", CONFIGURED)]),
        FakeClock(),
    )
    async with client_of(front) as client:
        assert await shown(client) == {
            **STOCK,
            "runner_source": "workers",
            "runners": [
                {**STOCK, "workers": ["decode-0"]},
                {**OWN, "workers": ["decode-1", "prefill-0"]},
            ],
        }


async def test_until_a_worker_has_answered_the_configuration_is_shown_as_such():
    clock, decode = FakeClock(), FakeHandle(RayError())
    async with client_of(front_over(decode, FakeHandle([]), clock)) as client:
        assert await shown(client) == BY_CONFIGURATION
        decode.replies = [worker("decode-0", GAVE_WAY)]
        clock.advance(5)
        assert (await shown(client))["runners"] == [{**STOCK, "workers": ["decode-0"]}]


async def test_a_worker_that_hangs_is_not_waited_for_and_hides_nobody(monkeypatch):
    monkeypatch.setattr(deployments.front, "_ASK_TIMEOUT_S", 0.01)
    decode, prefill = FakeHandle([hanging]), FakeHandle([worker("prefill-0", GAVE_WAY)])
    async with client_of(front_over(decode, prefill, FakeClock())) as client:
        assert (await shown(client))["runners"] == [{**STOCK, "workers": ["prefill-0"]}]


@pytest.mark.parametrize("later", [[], [hanging], RayError()], ids=["gone", "hangs", "lost"])
async def test_what_workers_said_holds_until_another_says_something_else(monkeypatch, later):
    monkeypatch.setattr(deployments.front, "_ASK_TIMEOUT_S", 0.01)
    clock, decode = FakeClock(), FakeHandle([worker("decode-0", GAVE_WAY)])
    async with client_of(front_over(decode, FakeHandle([]), clock)) as client:
        said = await shown(client)
        assert len(decode.asked) == 1, "asked once for two pages"
        decode.replies = later
        clock.advance(5)
        assert await shown(client) == said
        assert len(decode.asked) == 2, "nor is a worker that does not answer asked at once again"
        decode.replies = [worker("decode-0", CONFIGURED)]
        clock.advance(4)
        assert await shown(client) == said
        clock.advance(1)
        assert (await shown(client))["runners"] == [{**OWN, "workers": ["decode-0"]}]


async def test_a_front_is_no_worker():
    other_front = FakeHandle([worker("front-1", None)])
    async with client_of(front_over(other_front, FakeHandle([]), FakeClock())) as client:
        assert await shown(client) == BY_CONFIGURATION


async def test_nobody_is_asked_for_a_model_that_is_not_served():
    decode = FakeHandle([worker("decode-0", GAVE_WAY)])
    async with client_of(front_over(decode, FakeHandle([]), FakeClock())) as client:
        assert (await client.get("/v1/models/other")).status_code == httpx.codes.NOT_FOUND
    assert decode.asked == []
