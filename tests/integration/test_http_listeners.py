"""Nothing of a running server is reachable from beyond this host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.cluster.listeners import listeners, wide_listeners
from deployments.cluster.processes import MARKER
from tests.fakes.until import until
from tests.tools.baton_server import BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

LISTEN_WIDE = """
import socket, sys
with socket.create_server(("0.0.0.0", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


async def test_every_listener_of_the_process_tree_is_loopback(baton_server: BatonServer) -> None:
    def listens_for_clients() -> bool:
        """Not for a moment, when a new HAProxy takes over from the one before."""
        return baton_server.port in {found.port for found in listeners(baton_server.pid)}

    await until(listens_for_clients)
    processes = {found.pid for found in listeners(baton_server.pid)}
    assert baton_server.replica_pid("Prefill") in processes  # listens for fetches of KV
    assert baton_server.replica_pid("Decode") in processes  # listens for Fronts
    assert wide_listeners(baton_server.pid) == []


def test_a_wide_listener_in_the_process_tree_is_reported(baton_server: BatonServer) -> None:
    """The test above can fail: one more process of the instance listens on every address."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN_WIDE],
        env={**os.environ, MARKER: baton_server.instance_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as planted:
        try:
            assert planted.stdout is not None
            port = int(planted.stdout.readline())
            (found,) = wide_listeners(baton_server.pid)
        finally:
            planted.kill()

    assert (found.pid, found.port, found.host) == (planted.pid, port, "0.0.0.0")
    assert wide_listeners(baton_server.pid) == []
