"""Decode workers that are taken away or replaced on purpose, under load: no request is lost.

Serve sees none of their requests, so that it is the workers and Fronts who see to that.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.until import until
from tests.integration.scaled_app import DEPLOY_TIMEOUT_S
from tests.tools.asking import make_client
from tests.tools.baton_server import MODEL, free_port
from tests.tools.load import HANG_S, NUM_CLIENTS, REQUEST_TIMEOUT_S, Load, answers_of
from workers.models.errors import ModelNotFoundError
from workers.models.store import ModelStore, default_cache_dir

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).resolve().parents[2]
ONE_FEWER = {"name": "Decode", "num_replicas": 1}
ANOTHER = {
    **ONE_FEWER,
    # Serve replaces a replica whose resources change.
    "ray_actor_options": {
        "num_cpus": 0.2,
    },
}


class Scaled:
    """The program, and what it is told."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._log = directory / "scaled.err"
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.integration.scaled_app",
                    directory / "run",
                    str(self.port),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def deploy(self, *deployments: dict[str, Any]) -> None:
        """Return once it is in force."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(deployments) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "deployed\n", self._log.read_text()

    def decode_pids(self) -> set[int]:
        """The processes of the decode workers."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return {process.pid for process in processes if "baton:Decode" in _title(process)}

    def close(self) -> None:
        """End it as its own end does."""
        self.process.communicate(timeout=60)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has ended meanwhile


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[Scaled]:
    try:
        ModelStore(default_cache_dir(os.environ)).resolve(MODEL)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    made = Scaled(tmp_path)
    try:
        yield made
    finally:
        made.close()


async def test_taking_away_and_replacing_decode_workers_costs_no_answer(scaled: Scaled) -> None:
    await asyncio.to_thread(scaled.deploy)
    first = scaled.decode_pids()
    assert len(first) == 2
    async with make_client(f"http://127.0.0.1:{scaled.port}", timeout_s=HANG_S) as client:
        client.headers["x-request-timeout-seconds"] = str(REQUEST_TIMEOUT_S)
        load = Load(client=client, expected=await answers_of(client))
        load.start()

        async with asyncio.timeout(HANG_S):
            await load.all_answered.wait()
        await asyncio.to_thread(scaled.deploy, ONE_FEWER)
        await until(lambda: len(scaled.decode_pids()) == 1, timeout_s=DEPLOY_TIMEOUT_S)
        (left,) = scaled.decode_pids()
        assert left in first

        answered = len(load.endings)
        await asyncio.to_thread(scaled.deploy, ANOTHER)
        await until(
            lambda: len(pids := scaled.decode_pids()) == 1 and left not in pids,
            timeout_s=DEPLOY_TIMEOUT_S,
        )
        await until(lambda: len(load.endings) >= answered + NUM_CLIENTS, timeout_s=HANG_S)
        await load.stop()
        print(f"{len(load.endings)} answers")
    assert load.wrong() == []
    assert load.failures() == {}
