"""The prefill deployment: whom a replica hears, and how it goes when told to, without a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve._private.replica import Replica as ServeReplica

import deployments.prefill
import workers.assembly
from configs.schema import Settings
from deployments.control_call import SNAPSHOT, ControlCall
from deployments.metrics import WorkerSnapshot, sample
from deployments.prefill import Prefill
from deployments.prefill_call import PrefillCall
from kv_transfer.sealing import REFUSAL
from tests.fakes.prefill_call import OTHER_SECRET, SECRET, FakePrefill, answers, prefill_request
from tests.fakes.until import until

GRACE_S = 5.0


class FakePrefillWorker:
    """A `PrefillWorker`, as far as its deployment uses it."""

    def __init__(self) -> None:
        self.prefill = FakePrefill(*answers())
        self.drains: list[float] = []
        self.ended = asyncio.Event()

    async def start(self) -> None:
        """See `PrefillWorker.start`."""

    async def drain(self, *, timeout_s: float) -> None:
        """See `PrefillWorker.drain`; it lasts until the test ends it."""
        self.drains.append(timeout_s)
        await self.ended.wait()


class Replica(Prefill):
    """Ended by the test, as by Serve, and not when Python collects it."""

    def __del__(self) -> None:
        """Nothing is left to do."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakePrefillWorker:
    """What the deployment builds."""
    built = FakePrefillWorker()
    context = SimpleNamespace(
        rank=SimpleNamespace(rank=0),
        _deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=GRACE_S),
    )
    monkeypatch.setattr(workers.assembly, "build_prefill_worker", lambda *_, **__: built)
    monkeypatch.setattr(deployments.prefill.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deployments.prefill, "prepare_engine_process", lambda *_, **__: None)
    monkeypatch.setenv("BATON_SECRET", SECRET.reveal())
    return built


@pytest.fixture
def last_call(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The end of the last of the replica's calls, which Serve waits for."""
    ended = asyncio.Event()

    async def wait_for_calls(_: object) -> None:
        await ended.wait()

    monkeypatch.setattr(ServeReplica, "perform_graceful_shutdown", wait_for_calls)
    return ended


async def replica_made() -> Replica:
    replica = Replica.__new__(Replica)  # as Serve makes it
    await replica.__init__(Settings())  # type: ignore[func-returns-value]  # as Serve awaits it
    return replica


async def test_a_replica_drains_while_serve_waits_for_its_calls(worker, last_call):
    replica = await replica_made()
    stopping = asyncio.create_task(ServeReplica.perform_graceful_shutdown(object()))
    await until(lambda: bool(worker.drains))
    assert not stopping.done()
    # Ended by the drain, the last call lets Serve go on to the replica's own end.
    last_call.set()
    await stopping
    ending = asyncio.create_task(Prefill.__del__(replica))
    await asyncio.sleep(0)
    assert not ending.done(), "the process may not end before the worker has"
    worker.ended.set()
    await ending

    assert len(worker.drains) == 1
    assert 0 < worker.drains[0] < GRACE_S, "Serve kills it when its time is up"


async def test_a_replica_that_is_ended_without_a_word_drains_all_the_same(worker, last_call):
    replica = await replica_made()
    worker.ended.set()
    await Prefill.__del__(replica)

    assert len(worker.drains) == 1


async def test_a_replica_hears_and_answers_who_knows_its_secret_alone(worker):
    replica = await replica_made()
    request = prefill_request()
    call = PrefillCall(SECRET, request)

    assert [answer async for answer in replica.prefill(request)] == [REFUSAL]
    assert worker.prefill.requests == []
    heard = [call.open(answer) async for answer in replica.prefill(call.message)]
    assert heard == list(answers())
    assert worker.prefill.requests == [request]


async def test_a_replica_shows_the_strangers_at_both_of_its_doors(worker, monkeypatch):
    def shown(_: object, *, num_strangers: int) -> WorkerSnapshot:
        samples = (sample("baton_strangers_total", num_strangers),)
        return WorkerSnapshot(worker_id="prefill-0", role="prefill", samples=samples)

    monkeypatch.setattr(deployments.prefill, "prefill_snapshot", shown)
    replica = await replica_made()
    assert [answer async for answer in replica.prefill(prefill_request())] == [REFUSAL]
    for stranger in ("snapshot", ControlCall(OTHER_SECRET, SNAPSHOT).message):
        assert await replica.control(stranger) == REFUSAL
    call = ControlCall(SECRET, SNAPSHOT)
    (snapshot,) = call.open_all([await replica.control(call.message)]).values()
    assert snapshot == shown(None, num_strangers=1 + 2)
