"""What `baton serve` tells its deployments when it stops: in which order, and whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import deployments.serving
from deployments.call_gate import CallGate
from deployments.cluster.local import ApplicationState, ClusterStatus, DeploymentState
from deployments.control_call import DRAIN, END_ALL, STOP_RESUMING, ControlDoor
from deployments.serving import _draining
from kv_transfer.authentication import Secret
from tests.fakes.prefill_call import OTHER_SECRET, SECRET

FRONT_FIRST, WORKERS, FRONT_LAST = "Front.stop_resuming", "Decode.drain", "Front.end_all"


METHODS = {"Front": (STOP_RESUMING, END_ALL), "Decode": (DRAIN,)}


class FakeCluster:
    """A `LocalCluster`, as far as the end of `baton serve` uses it."""

    def __init__(self, *, broken: str = "", **replicas: list[Secret]) -> None:
        """`replicas` are of each deployment the secrets; nobody reaches the `broken` one."""
        self.broken = broken
        self.told: list[str] = []
        """What each replica has done."""
        self._doors = {
            name: [ControlDoor(CallGate(secret), self._handlers(name)) for secret in secrets]
            for name, secrets in replicas.items()
        }

    def _handlers(self, deployment: str) -> dict[object, Callable[..., None]]:
        def handler(method: str) -> Callable[..., None]:
            return lambda *_: self.told.append(f"{deployment}.{method}")

        return {method: handler(method.name) for method in METHODS[deployment]}

    def status(self) -> ClusterStatus:
        """See `LocalCluster.status`."""
        states = tuple(
            DeploymentState(name=name, status="HEALTHY", num_running=len(doors), message="")
            for name, doors in self._doors.items()
        )
        app = ApplicationState(name="baton", status="RUNNING", message="", deployments=states)
        return ClusterStatus(url="", applications=(app,))

    def ask_all(
        self, _: str, deployment: str, method: str, message: bytes, *, timeout_s: float
    ) -> list[object]:
        """See `LocalCluster.ask_all`."""
        assert timeout_s > 0
        assert method == "control"
        if deployment == self.broken:
            raise TimeoutError
        return [asyncio.run(door.answer(message)) for door in self._doors[deployment]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments.serving, "_LAST_REPLIES_S", 0.0)


def told(cluster: FakeCluster) -> list[str]:
    with _draining(cluster, SECRET):  # type: ignore[arg-type]
        assert cluster.told == []
    return cluster.told


@pytest.mark.parametrize(
    ("fronts", "workers", "expected"),
    [
        (1, 1, [FRONT_FIRST, WORKERS, FRONT_LAST]),
        (2, 2, [FRONT_FIRST, FRONT_FIRST, WORKERS, WORKERS, FRONT_LAST, FRONT_LAST]),
        (1, 0, [FRONT_FIRST, FRONT_LAST]),
        (0, 1, []),
        (0, 0, []),
    ],
)
def test_fronts_are_told_before_the_workers_drain_and_after(fronts, workers, expected, caplog):
    assert told(FakeCluster(Front=fronts * [SECRET], Decode=workers * [SECRET])) == expected
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("broken", "expected"), [("Front", [WORKERS]), ("Decode", [FRONT_FIRST, FRONT_LAST])]
)
def test_who_does_not_answer_keeps_nobody_from_being_told(broken, expected, caplog):
    assert told(FakeCluster(Front=[SECRET], Decode=[SECRET], broken=broken)) == expected
    assert f"{broken}." in caplog.text


def test_who_does_not_know_the_secret_is_told_nothing_and_keeps_nobody_from_it(caplog):
    cluster = FakeCluster(Front=[SECRET], Decode=[OTHER_SECRET, SECRET, OTHER_SECRET])
    assert told(cluster) == [FRONT_FIRST, WORKERS, FRONT_LAST]
    assert "control answer ignored method=drain" in caplog.text


def test_a_deployment_where_nobody_knows_the_secret_is_named(caplog):
    cluster = FakeCluster(Front=[SECRET], Decode=[OTHER_SECRET])
    assert told(cluster) == [FRONT_FIRST, FRONT_LAST]
    assert "Decode.drain done by 0 of 0 replicas" in caplog.text
