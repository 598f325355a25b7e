"""What a user is told of a failed deployment."""

import pytest

from deployments.cluster.local import ApplicationState, ClusterStatus, cause

TRACEBACK = """\
The deployment failed to start 1 times in a row. Error:
\x1b[36mray::ServeReplica:a:D.initialize()\x1b[39m (pid=1, ip=127.0.0.1)
  File "x.py", line 3, in __init__
    raise PoolExhaustedError("no blocks")
workers.errors.PoolExhaustedError: no blocks: 3 needed, 2 there

The above exception was the direct cause of something with more lines
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (TRACEBACK, "workers.errors.PoolExhaustedError: no blocks: 3 needed, 2 there"),
        ("Not enough CPUs.", "Not enough CPUs."),
        ("", "no reason given"),
    ],
)
def test_cause_is_one_line(message: str, expected: str) -> None:
    assert cause(message) == expected


def test_cluster_without_applications_is_not_ready() -> None:
    running = ApplicationState(name="a", status="RUNNING", message="", deployments=())
    failed = ApplicationState(name="b", status="DEPLOY_FAILED", message="", deployments=())

    assert not ClusterStatus(url="", applications=()).is_ready
    assert ClusterStatus(url="", applications=(running,)).is_ready
    assert not ClusterStatus(url="", applications=(running, failed)).is_ready
