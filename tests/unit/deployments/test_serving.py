"""What `baton serve` tells its deployments when it stops: in which order, and whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

import deployments.serving
from deployments.call_gate import CallGate
from deployments.cluster.local import ApplicationState, ClusterStatus, DeploymentState
from deployments.control_call import DRAIN, END_ALL, STOP_RESUMING, ControlDoor
from deployments.serving import _draining
from kv_transfer.authentication import Secret
from tests.fakes.control_call import GullibleGate
from tests.fakes.prefill_call import OTHER_SECRET, SECRET

FRONT_FIRST, WORKERS, FRONT_LAST = "Front.stop_resuming", "Decode.drain", "Front.end_all"


METHODS = {"Front": (STOP_RESUMING, END_ALL), "Decode": (DRAIN,)}


SILENT = None
"""In place of a replica's secret: it does not answer."""


class FakeCluster:
    """A `LocalCluster`, as far as the end of `baton serve` uses it."""

    def __init__(self, *, broken: str = "", **replicas: list[Secret | None]) -> None:
        """`replicas` are of each deployment the secrets; nobody reaches the `broken` one."""
        self.broken = broken
        self.told: list[str] = []
        """What each replica has done."""
        self.arguments: list[tuple[object, ...]] = []
        """Of each of these."""
        self.waits: list[tuple[str, float]] = []
        """By deployment, seconds for which a silent replica was waited for."""
        self._doors = {
            name: [self._door(name, secret) for secret in secrets]
            for name, secrets in replicas.items()
        }

    def _door(self, name: str, secret: Secret | None) -> ControlDoor | None:
        if secret is SILENT:
            return None
        gate = GullibleGate() if secret is OTHER_SECRET else CallGate(secret)
        return ControlDoor(gate, self._handlers(name, is_true=secret is SECRET))

    def _handlers(self, deployment: str, *, is_true: bool) -> dict[object, Callable[..., None]]:
        def handler(method: str) -> Callable[..., None]:
            def handle(*arguments: object) -> None:
                if is_true:
                    self.told.append(f"{deployment}.{method}")
                    self.arguments.append(arguments)

            return handle

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
        self,
        _: str,
        deployment: str,
        method: str,
        message: bytes,
        *,
        timeout_s: float,
        suffices: Callable[[Sequence[object]], bool],
    ) -> list[object]:
        """See `LocalCluster.ask_all`; a silent replica would be the last to answer."""
        assert timeout_s > 0
        assert method == "control"
        if deployment == self.broken:
            raise TimeoutError
        doors = self._doors[deployment]
        answers = [asyncio.run(door.answer(message)) for door in doors if door is not None]
        if len(answers) < len(doors) and not suffices(answers):
            self.waits.append((deployment, timeout_s))
        return answers


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


def test_workers_get_the_time_that_is_said_and_are_waited_for_longer():
    cluster = FakeCluster(Front=[SECRET], Decode=[SECRET])
    told(cluster)
    assert cluster.arguments == [(), (5.0,), ()]
    assert deployments.serving._DRAIN_S == 5.0


def test_who_does_not_know_the_secret_is_told_nothing_and_keeps_nobody_from_it(caplog):
    cluster = FakeCluster(Front=[SECRET], Decode=[OTHER_SECRET, SECRET, OTHER_SECRET])
    assert told(cluster) == [FRONT_FIRST, WORKERS, FRONT_LAST]
    assert "control answer ignored method=drain" in caplog.text
    assert "Decode.drain done by 1 of 3 replicas" in caplog.text


def test_a_deployment_where_nobody_knows_the_secret_is_named(caplog):
    cluster = FakeCluster(Front=[SECRET], Decode=[OTHER_SECRET])
    assert told(cluster) == [FRONT_FIRST, FRONT_LAST]
    assert "Decode.drain done by 0 of 1 replicas" in caplog.text


@pytest.mark.parametrize("others", [0, 1])
def test_a_silent_worker_is_waited_for_once_and_said(others, caplog):
    cluster = FakeCluster(Front=[SECRET], Decode=[SILENT, *others * [SECRET]])
    assert told(cluster) == [FRONT_FIRST, *others * [WORKERS], FRONT_LAST]
    assert cluster.waits == [("Decode", deployments.serving._INTRODUCE_TIMEOUT_S)]
    assert f"Decode.drain done by {others} of {1 + others} replicas" in caplog.text


def test_a_silent_front_is_asked_again_and_keeps_the_other_from_nothing(caplog):
    cluster = FakeCluster(Front=[SECRET, SILENT], Decode=[SECRET])
    assert told(cluster) == [FRONT_FIRST, WORKERS, FRONT_LAST]
    assert cluster.waits == 2 * [("Front", deployments.serving._INTRODUCE_TIMEOUT_S)]
    assert "Front.end_all done by 1 of 2 replicas" in caplog.text
