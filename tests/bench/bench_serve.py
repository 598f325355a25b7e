"""What Serve and HTTP add to the engine, and what the service costs when nobody asks anything.

    python -m tests.bench.bench_serve            # everything, about four minutes
    python -m tests.bench.bench_serve start      # only the time to the first token, twice
    python -m tests.bench.bench_serve idle       # only CPU and memory at rest
    python -m tests.bench.bench_serve added      # only the time and CPU that Serve adds

`added` asks the same engine, once in this process and once behind `baton serve colocated`, one
request after the other and in short turns, so that a busy machine is busy for both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import psutil

from configs.load import load
from deployments.cluster.processes import members
from deployments.process import prepare_engine_process
from kv_transfer.authentication import Secret
from tests.tools.tiny_model import make_tiny_model
from workers.assembly import build_decode_worker
from workers.decode import DecodeWorker
from workers.engine.sampling_params import SamplingParams
from workers.host import available_cores
from workers.messages import GenerateRequest, TokenFrame

TURN = 8
"""Requests to one side before the other one's turn."""
OVERRIDES = ("model.max_model_len=2048", "decode.engine.threads=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One request."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running `baton serve`."""

    url: str
    process: subprocess.Popen[bytes]
    ready_s: float

    def pids(self) -> list[int]:
        """The command itself and every process of its instance."""
        own = psutil.Process(self.process.pid)
        markers = {
            value
            for child in own.children(recursive=True)
            if (value := _environ(child.pid).get("BATON_INSTANCE"))
        }
        found = {member.pid for marker in markers for member in members(marker)}
        return sorted({own.pid, *found})

    def cpu_s(self) -> float:
        """CPU seconds of all of them so far."""
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    def pss_bytes(self) -> int:
        """Memory of all of them, shared pages counted once."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_full_info().pss
        return total


def _environ(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


@contextlib.contextmanager
def serving(preset: str, *overrides: str) -> Iterator[Server]:
    """`baton serve PRESET` on a free port, for the time of a block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    sets = [argument for override in overrides for argument in ("--set", override)]
    started = time.monotonic()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("baton"), "serve", preset, "--port", str(port), *sets],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"baton serve {preset} ended with {process.returncode}")
            time.sleep(0.05)
        yield Server(url=url, process=process, ready_s=time.monotonic() - started)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def ask_engine(worker: DecodeWorker, prompt: tuple[int, ...], tokens: int) -> Timing:
    """One request to the engine in this process."""
    request = GenerateRequest(
        request_id="bench",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0),
    )
    cpu = time.process_time()
    started = time.monotonic()
    times = [
        time.monotonic()
        async for event in worker.generate(request)
        if isinstance(event, TokenFrame)
    ]
    return _timing(started, times, time.process_time() - cpu)


class BareClient:
    """An HTTP client of one connection that does nothing else.

    A client library takes a millisecond or two to send a request, which Serve does not add.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        """Connect."""
        address = httpx.URL(self._server.url)
        self._streams = await asyncio.open_connection(address.host, address.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        assert self._streams is not None
        self._streams[1].close()
        await self._streams[1].wait_closed()

    async def ask(self, prompt: tuple[int, ...], tokens: int) -> Timing:
        """The request of `ask_engine`, over HTTP."""
        body = {
            "model": "smollm2-135m",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = _post_request(json.dumps(body).encode())
        cpu = self._server.cpu_s()
        started = time.monotonic()
        times = [time.monotonic() async for event in self._events(request) if b'"text"' in event]
        return _timing(started, times, self._server.cpu_s() - cpu)

    async def _events(self, request: bytes) -> AsyncIterator[bytes]:
        """What comes back, as it comes, until the chunked body ends."""
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(request)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received = await reader.read(1 << 16)
            if not received:
                raise SystemExit("the server closed the connection")
            yield received


def _post_request(body: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _timing(started: float, times: list[float], cpu_s: float) -> Timing:
    gaps = tuple(b - a for a, b in itertools.pairwise(times))
    return Timing(ttft_s=times[0] - started, gaps_s=gaps, cpu_s=cpu_s)


async def measure_added(model: str, rounds: int, prompt_tokens: int, output_tokens: int) -> None:
    """Engine and server in turns of some requests; prints medians and their difference."""
    overrides = (*OVERRIDES, f"model.source={model}", "model.name=smollm2-135m")
    settings = load("colocated", environ=os.environ, overrides=overrides)
    prepare_engine_process(settings, cores=available_cores())
    worker = build_decode_worker(
        settings, worker_id="bench", environ=os.environ, prefill=None, secret=Secret.fresh()
    )
    await worker.start()
    rng = random.Random(0)
    engine: list[Timing] = []
    served: list[Timing] = []
    try:
        with serving("colocated", *overrides) as server:
            async with BareClient(server) as client:
                for _ in range(math.ceil(rounds / TURN)):
                    prompts = [_random_prompt(rng, prompt_tokens) for _ in range(TURN + 1)]
                    # The first of each turn finds the caches full of the other side's memory.
                    engine += [await ask_engine(worker, p, output_tokens) for p in prompts][1:]
                    served += [await client.ask(p, output_tokens) for p in prompts][1:]
    finally:
        await worker.stop()
    print(f"\nOne request at a time, {prompt_tokens} + {output_tokens} tokens, n = {len(engine)}")
    _print_added(engine, served, output_tokens)


def _random_prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(tokens))


def _print_added(engine: list[Timing], served: list[Timing], output_tokens: int) -> None:
    def row(name: str, unit: str, a: list[float], b: list[float]) -> None:
        added = [y - x for x, y in zip(a, b, strict=True)]
        low, middle, high = statistics.quantiles(added, n=4)
        print(
            f"{name:<22}{statistics.median(a):>10.2f}{statistics.median(b):>10.2f}"
            f"{middle:>+10.2f}   [{low:+.2f}, {high:+.2f}] {unit}"
        )

    print(f"{'median':<22}{'engine':>10}{'served':>10}{'added':>10}   [quartiles of added]")
    row("first token", "ms", *([1e3 * t.ttft_s for t in some] for some in (engine, served)))
    row(
        "gap between tokens",
        "ms",
        *([1e3 * statistics.median(t.gaps_s) for t in some] for some in (engine, served)),
    )
    row(
        "CPU per token",
        "ms",
        *([1e3 * t.cpu_s / output_tokens for t in some] for some in (engine, served)),
    )


def measure_start() -> None:
    """From the command to /ready and to the first token, twice."""
    for name in ("first start", "second start"):
        started = time.monotonic()
        with serving("local") as server:
            body = {"model": "smollm2-135m", "prompt": "Hello", "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
            first = time.monotonic() - started
            print(f"{name}: ready after {server.ready_s:.1f} s, first token after {first:.1f} s")


def measure_idle(seconds: float) -> None:
    """CPU and memory of the preset `local` while nobody asks anything."""
    with serving("local") as server:
        time.sleep(5)
        before = server.cpu_s()
        time.sleep(seconds)
        cores = (server.cpu_s() - before) / seconds
        processes = len(server.pids())
        print(
            f"idle: {cores:.3f} cores over {seconds:.0f} s, {server.pss_bytes() / 2**20:.0f} MiB "
            f"in {processes} processes"
        )


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("start", "idle", "added"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a model whose steps take 2 ms")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--idle-seconds", type=float, default=20)
    arguments = parser.parse_args()
    print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    if arguments.part in (None, "start"):
        measure_start()
    if arguments.part in (None, "idle"):
        measure_idle(arguments.idle_seconds)
    if arguments.part in (None, "added"):
        lengths = arguments.prompt_tokens, arguments.output_tokens
        with tempfile.TemporaryDirectory() as directory:
            tiny = make_tiny_model(Path(directory)) if arguments.tiny else "smollm2-135m"
            asyncio.run(measure_added(str(tiny), arguments.rounds, *lengths))


if __name__ == "__main__":
    main()
