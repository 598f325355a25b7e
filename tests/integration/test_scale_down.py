"""Workers that are taken away or replaced on purpose, under load: no request is lost.

Serve sees none of a decode worker's requests, so that it is the workers and Fronts who see to that.
Of a prefill worker's it sees when they end, and not what for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.until import until
from tests.integration.scaled_app import DEPLOY_TIMEOUT_S
from tests.tools.asking import make_client, story_request
from tests.tools.baton_server import MODEL, Role, free_port
from tests.tools.load import HANG_S, NUM_CLIENTS, REQUEST_TIMEOUT_S, Load, answers_of
from tests.tools.scrape import parse
from tests.tools.tiny_model import make_tiny_model
from workers.models.errors import ModelNotFoundError
from workers.models.store import ModelStore, default_cache_dir

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).resolve().parents[2]
TWO_DECODE = (
    "model.dtype=fp32",  # so that a text does not depend on what else is in its batch
    "model.max_model_len=2048",
    "decode.replicas=2",
    "decode.engine.pool_tokens=8192",
)
TWO_PREFILL = (
    "model.dtype=fp32",
    f"model.name={MODEL}",
    "model.max_model_len=2048",
    "decode.engine.pool_tokens=16384",
    "decode.engine.threads=1",
    "prefill.replicas=2",
    "prefill.engine.pool_tokens=16384",
    "prefill.engine.prefill_chunk_tokens=16",  # a hundred steps, however small the model
    "prefill.engine.threads=1",
)
ONE_FEWER = {"name": "Decode", "num_replicas": 1}
ANOTHER = {
    **ONE_FEWER,
    # Serve replaces a replica whose resources change.
    "ray_actor_options": {
        "num_cpus": 0.2,
    },
}
FAILURES = "baton_handoff_failures_total"


class Scaled:
    """The program, and what it is told."""

    def __init__(self, directory: Path, preset: str, settings: Sequence[str]) -> None:
        self.port = free_port()
        self._run = directory / "run"
        self._log = directory / "scaled.err"
        with self._log.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.integration.scaled_app",
                    self._run,
                    str(self.port),
                    preset,
                    *settings,
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

    def pids(self, role: Role) -> set[int]:
        """The processes of a deployment's replicas."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return {process.pid for process in processes if f"baton:{role}" in _title(process)}

    def close(self) -> None:
        """End it as its own end does; safe to repeat."""
        if self.process.poll() is None:
            self.process.communicate(timeout=60)

    def logged(self, pattern: str) -> list[tuple[str, ...]]:
        """What a pattern's groups match in what the workers wrote; after the end alone."""
        logs = (self._run / "logs").glob("worker-*.err")
        return [found.groups() for log in logs for found in re.finditer(pattern, log.read_text())]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has ended meanwhile


Scale = Callable[[str, Sequence[str]], Scaled]


@pytest.fixture
def scale(tmp_path: Path) -> Iterator[Scale]:
    """Start the program with a preset and settings; it ends with the test."""
    try:
        ModelStore(default_cache_dir(os.environ)).resolve(MODEL)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    with ExitStack() as ends:

        def start(preset: str, settings: Sequence[str]) -> Scaled:
            made = Scaled(tmp_path, preset, settings)
            ends.callback(made.close)
            return made

        yield start


async def test_taking_away_and_replacing_decode_workers_costs_no_answer(scale: Scale) -> None:
    scaled = scale("colocated", TWO_DECODE)
    await asyncio.to_thread(scaled.deploy)
    first = scaled.pids("Decode")
    assert len(first) == 2
    async with make_client(f"http://127.0.0.1:{scaled.port}", timeout_s=HANG_S) as client:
        client.headers["x-request-timeout-seconds"] = str(REQUEST_TIMEOUT_S)
        load = Load(client=client, expected=await answers_of(client))
        load.start()

        async with asyncio.timeout(HANG_S):
            await load.all_answered.wait()
        await asyncio.to_thread(scaled.deploy, ONE_FEWER)
        await until(lambda: len(scaled.pids("Decode")) == 1, timeout_s=DEPLOY_TIMEOUT_S)
        (left,) = scaled.pids("Decode")
        assert left in first

        answered = len(load.endings)
        await asyncio.to_thread(scaled.deploy, ANOTHER)
        await until(
            lambda: len(pids := scaled.pids("Decode")) == 1 and left not in pids,
            timeout_s=DEPLOY_TIMEOUT_S,
        )
        await until(lambda: len(load.endings) >= answered + NUM_CLIENTS, timeout_s=HANG_S)
        await load.stop()
        print(f"{len(load.endings)} answers")
    assert load.wrong() == []
    assert load.failures() == {}


def long_request(number: int) -> dict[str, Any]:
    """As `story_request`, with a prompt of some 1,600 tokens."""
    days = [f"Day {day}: the keeper of light {number} saw {day * 3} ships." for day in range(100)]
    return {**story_request(number), "prompt": " ".join(days)}


async def test_prefill_worker_that_is_taken_away_hands_over_what_it_has(
    scale: Scale, tmp_path: Path
) -> None:
    tiny_model = await asyncio.to_thread(make_tiny_model, tmp_path)
    scaled = scale("local", [*TWO_PREFILL, f"model.source={tiny_model}"])
    await asyncio.to_thread(scaled.deploy)
    assert len(scaled.pids("Prefill")) == 2
    async with make_client(f"http://127.0.0.1:{scaled.port}", timeout_s=HANG_S) as client:
        client.headers["x-request-timeout-seconds"] = str(REQUEST_TIMEOUT_S)
        expected = await answers_of(client, long_request)
        load = Load(client=client, expected=expected, request_of=long_request)
        load.start()

        async with asyncio.timeout(HANG_S):
            await load.all_answered.wait()
        await asyncio.to_thread(scaled.deploy, {"name": "Prefill", "num_replicas": 1})
        await until(lambda: len(scaled.pids("Prefill")) == 1, timeout_s=DEPLOY_TIMEOUT_S)
        answered = len(load.endings)
        await until(lambda: len(load.endings) >= answered + NUM_CLIENTS, timeout_s=HANG_S)
        await load.stop()
        scrape = parse((await client.get("/metrics")).text)
    print(f"{len(load.endings)} answers, failures {scrape.by_label(FAILURES, 'error')}")
    assert load.wrong() == []
    assert load.failures() == {}
    # What came while it went was refused; nothing that it had begun was lost.
    assert set(scrape.by_label(FAILURES, "error")) <= {"HandoffRefusedError"}
    await asyncio.to_thread(scaled.close)
    drained = scaled.logged(r"prefill drained hand_offs=(\d+) revoked=(\d+)")
    begun = sorted(int(num_begun) for num_begun, _ in drained)
    assert len(begun) == 2
    assert begun[0] == 0 < begun[1], "the other one goes at the end, when nobody asks any more"
    assert {num_revoked for _, num_revoked in drained} == {"0"}
