"""What `/v1/models` says of how the model is run: what the workers say, as far as they have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from ray.exceptions import RayError

import deployments.front
from deployments.call_gate import CallGate
from deployments.control_call import SNAPSHOT, ControlDoor
from deployments.front_service import FrontService
from deployments.metrics import WorkerSnapshot
from deployments.worker_metrics import decode_snapshot, prefill_snapshot
from tests.fakes.backend import tokens_then_end
from tests.fakes.clock import FakeClock
from tests.fakes.control_call import GullibleGate, unsealed
from tests.fakes.front import MODEL, client_of, ids_of, make_codec, make_front
from tests.fakes.handle import FakeHandle, Reply, hanging
from tests.fakes.prefill_call import OTHER_SECRET, SECRET
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


def snapshot_of(worker_id: str, runner: RunnerChoice | None) -> WorkerSnapshot:
    """One that says how a worker runs the model."""
    return WorkerSnapshot(worker_id=worker_id, role="any", samples=(), runner=runner)


def worker(worker_id: str, runner: RunnerChoice | None, gate: CallGate | None = None) -> Reply:
    """A replica whose snapshot says how it runs the model."""
    return replica(lambda: snapshot_of(worker_id, runner), gate)


def replica(snapshot: Callable[[], WorkerSnapshot], gate: CallGate | None = None) -> Reply:
    """One that is asked for nothing else; it knows the secret, or has a gate of its own."""
    return ControlDoor(gate or CallGate(SECRET), {SNAPSHOT: snapshot}).answer


def front_over(decode: FakeHandle, prefill: FakeHandle, clock: FakeClock) -> FrontService:
    """A Front that asks its workers as the deployment does, for a model of the family llama."""
    workers: Any = [decode, prefill]
    front, _ = make_front(
        tokens_then_end(ids_of("x")),
        codec=make_codec(),
        card={"runner": CONFIGURED},
        peer_snapshots=partial(deployments.front._snapshots, workers, but="front-0", secret=SECRET),
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
        decode, prefill = rig.decode, rig.prefill_workers[0]
        front = front_over(
            FakeHandle([replica(partial(decode_snapshot, decode, num_strangers=0))]),
            FakeHandle([replica(partial(prefill_snapshot, prefill, num_strangers=0))]),
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


@pytest.mark.parametrize(
    "impostor",
    [
        worker("decode-1", GAVE_WAY, CallGate(OTHER_SECRET)),
        worker("decode-1", GAVE_WAY, GullibleGate()),
        unsealed(snapshot_of("decode-1", GAVE_WAY)),
    ],
    ids=["refuses", "answers all the same", "answers unsealed"],
)
async def test_a_worker_that_does_not_know_the_secret_is_shown_nowhere(impostor):
    decode = FakeHandle([impostor, worker("decode-0", CONFIGURED)])
    async with client_of(front_over(decode, FakeHandle([impostor]), FakeClock())) as client:
        assert (await shown(client))["runners"] == [{**OWN, "workers": ["decode-0"]}]
        assert "decode-1" not in (await client.get("/metrics")).raise_for_status().text


async def test_a_front_does_not_show_itself_twice():
    fronts = FakeHandle([worker("front-0", CONFIGURED), worker("front-1", CONFIGURED)])
    async with client_of(front_over(fronts, FakeHandle([]), FakeClock())) as client:
        assert (await shown(client))["runners"] == [{**OWN, "workers": ["front-1"]}]


async def test_a_front_is_no_worker():
    other_front = FakeHandle([worker("front-1", None)])
    async with client_of(front_over(other_front, FakeHandle([]), FakeClock())) as client:
        assert await shown(client) == BY_CONFIGURATION


async def test_nobody_is_asked_for_a_model_that_is_not_served():
    decode = FakeHandle([worker("decode-0", GAVE_WAY)])
    async with client_of(front_over(decode, FakeHandle([]), FakeClock())) as client:
        assert (await client.get("/v1/models/other")).status_code == httpx.codes.NOT_FOUND
    assert decode.asked == []
