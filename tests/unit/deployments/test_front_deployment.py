"""The Front deployment: what it tells Serve, without Serve and without a model."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

import deployments.front
from configs.schema import Settings
from deployments.control_call import (
    DRAIN,
    END_ALL,
    INTRODUCE,
    SNAPSHOT,
    STOP_RESUMING,
    ControlCall,
)
from deployments.decode import Decode
from deployments.front import Front
from deployments.metrics import sample
from deployments.prefill import Prefill
from deployments.resume import ResumingBackend
from kv_transfer.sealing import REFUSAL
from tests.fakes.handle import FakeHandle
from tests.fakes.prefill_call import OTHER_SECRET, SECRET


class Replica(Front):
    """One that has only what a test gives it."""

    def __del__(self) -> None:
        """Nothing was started, or the test has ended it, as Serve does."""


def replica(*, is_watching: bool) -> Replica:
    made = Replica.__new__(Replica)
    made._pool = SimpleNamespace(is_watching=is_watching)
    return made


async def test_a_front_that_finds_no_new_worker_any_more_has_serve_replace_it():
    await replica(is_watching=True).check_health()
    with pytest.raises(RuntimeError, match="stopped looking for workers"):
        await replica(is_watching=False).check_health()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the backends behind Fronts that are made have been told."""
    words: list[str] = []

    class Backend(ResumingBackend):
        """Does nothing else of what it is told."""

        def stop_resuming(self) -> None:
            """See `ResumingBackend.stop_resuming`."""
            words.append("stop_resuming")

        def end_all(self) -> None:
            """See `ResumingBackend.end_all`."""
            words.append("end_all")

    monkeypatch.setattr(deployments.front, "ResumingBackend", Backend)
    return words


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> AsyncIterator[Replica]:
    """A Front as Serve starts it, without workers."""
    context = SimpleNamespace(
        rank=SimpleNamespace(rank=0), replica_id=SimpleNamespace(unique_id="replica-a")
    )
    model = SimpleNamespace(card=SimpleNamespace(name="tiny"))
    monkeypatch.setattr(deployments.front.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deployments.front, "read_served_model", lambda *_: model)
    monkeypatch.setattr(deployments.front, "log_to_stderr", lambda: None)
    monkeypatch.setenv("BATON_SECRET", SECRET.reveal())
    made = Replica.__new__(Replica)  # as Serve makes it
    workers: Any = FakeHandle([])
    await made.__init__(Settings(), workers, None)
    yield made
    await Front.__del__(made)


@pytest.mark.parametrize("method", [STOP_RESUMING, END_ALL], ids=lambda method: method.name)
async def test_a_front_does_what_who_knows_its_secret_tells_it_and_nothing_else(
    started, told, method
):
    introduced = ControlCall(SECRET, INTRODUCE)
    names = introduced.open_all([await started.control(introduced.message)])
    for message in (method.name, ControlCall(OTHER_SECRET, method, meant_for=names).message):
        assert await started.control(message) == REFUSAL
    assert told == []
    call = ControlCall(SECRET, method, meant_for=names)
    assert call.open_all([await started.control(call.message)]) == names
    assert told == [method.name]


async def test_a_front_is_told_nothing_by_what_is_for_its_workers(started, told):
    introduced = ControlCall(SECRET, INTRODUCE)
    names = introduced.open_all([await started.control(introduced.message)])
    call = ControlCall(SECRET, DRAIN, 5.0, meant_for=names)
    assert call.open_all([await started.control(call.message)]) == {}
    assert told == []


async def test_a_front_shows_the_strangers_at_its_gate(started):
    for stranger in ("snapshot", ControlCall(OTHER_SECRET, SNAPSHOT).message):
        assert await started.control(stranger) == REFUSAL
    call = ControlCall(SECRET, SNAPSHOT)
    (snapshot,) = call.open_all([await started.control(call.message)]).values()
    assert sample("baton_strangers_total", 2) in snapshot.samples


SERVE_S = {"check_health", "record_autoscaling_stats"}
"""What Serve calls itself, beside what begins with two underscores."""


@pytest.mark.parametrize(
    ("deployment", "sealed", "others"),
    [
        (Front, {"control"}, set()),
        (Decode, {"control"}, set()),
        (Prefill, {"control", "prefill"}, {"_leave"}),  # which is what `__del__` does
    ],
)
def test_serve_finds_no_method_by_name_that_takes_calls_unsealed(deployment, sealed, others):
    """It calls any that there is, for whoever has Ray's token."""
    ours = [vars(base) for base in deployment.__mro__ if base.__module__.startswith("deployments.")]
    own = {name for names in ours for name, value in names.items() if inspect.isroutine(value)}
    named = {name for name in own if not name.startswith("__")}
    assert sealed <= named <= sealed | others | SERVE_S
