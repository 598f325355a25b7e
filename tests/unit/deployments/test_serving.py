"""What `baton serve` asks of its deployments when it stops, in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import deployments.serving
from deployments.cluster.local import ApplicationState, ClusterStatus, DeploymentState
from deployments.serving import _draining

FRONT_FIRST, WORKERS, FRONT_LAST = "Front.stop_resuming", "Decode.drain", "Front.end_all"


@dataclass(slots=True, kw_only=True)
class FakeCluster:
    """A `LocalCluster`, as far as the end of `baton serve` uses it."""

    replicas: dict[str, int]
    broken: str = ""
    asked: list[str] = field(default_factory=list)

    def status(self) -> ClusterStatus:
        """See `LocalCluster.status`."""
        states = tuple(
            DeploymentState(name=name, status="HEALTHY", num_running=number, message="")
            for name, number in self.replicas.items()
        )
        app = ApplicationState(name="baton", status="RUNNING", message="", deployments=states)
        return ClusterStatus(url="", applications=(app,))

    def ask_all(
        self, _: str, deployment: str, method: str, *__: Any, timeout_s: float
    ) -> list[Any]:
        """See `LocalCluster.ask_all`."""
        assert timeout_s > 0
        self.asked.append(f"{deployment}.{method}")
        if self.asked[-1] == self.broken:
            raise TimeoutError
        return [None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployments.serving, "_LAST_REPLIES_S", 0.0)


def asked(cluster: FakeCluster) -> list[str]:
    with _draining(cluster):  # type: ignore[arg-type]
        assert cluster.asked == []
    return cluster.asked


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({"Front": 1, "Decode": 2}, [FRONT_FIRST, WORKERS, FRONT_LAST]),
        ({"Front": 1, "Decode": 0}, [FRONT_FIRST, FRONT_LAST]),
        ({"Front": 0, "Decode": 1}, []),
        ({}, []),
    ],
)
def test_fronts_are_told_before_the_workers_drain_and_after(replicas, expected):
    assert asked(FakeCluster(replicas=replicas)) == expected


@pytest.mark.parametrize("broken", [FRONT_FIRST, WORKERS, FRONT_LAST])
def test_who_does_not_answer_keeps_nobody_from_being_asked(broken):
    cluster = FakeCluster(replicas={"Front": 1, "Decode": 1}, broken=broken)
    assert asked(cluster) == [FRONT_FIRST, WORKERS, FRONT_LAST]
