"""How long anything is held for a client that has left, by the phase in which it leaves.

    python -m tests.bench.bench_release                      # 5 clients each: a quick look
    python -m tests.bench.bench_release --rounds 100         # the figures in docs/kv-handoff.md
    python -m tests.bench.bench_release --chunks default     # steps as long as the settings' own
    python -m tests.bench.bench_release --kill --rounds 3    # and workers that are killed

One prefill and one decode worker with the default model. A client closes its connection when
`/metrics` shows its request in the phase; the time ends when `/metrics` shows that no block, lease,
transfer, sequence, place in the queue or request of it is left on any worker. Of a hand-off whose
other worker was killed nothing may be left on the one that lives; the next round waits for Serve to
start another.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics

import httpx

from configs.schema import EngineSettings
from tests.tools.baton_server import BatonServer
from tests.tools.bench_process import bench_directory, say
from tests.tools.phases import (
    KILLS,
    PHASES,
    RELEASE_SETTINGS,
    SMALL_CHUNKS,
    Leaving,
    Phase,
    Release,
    chunks_of,
)

HANG_S = 120.0
DEFAULT_CHUNKS = dict.fromkeys(SMALL_CHUNKS, EngineSettings().prefill_chunk_tokens)
CHUNKS = {"small": SMALL_CHUNKS, "default": DEFAULT_CHUNKS}


def main() -> None:
    """Print a line for each phase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="clients for each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--phase",
        type=int,
        action="append",
        choices=[phase.number for phase in PHASES],
        help="by its row in docs/architecture.md, Life of a request",
    )
    parser.add_argument("--chunks", choices=CHUNKS, default="small", help="of prompts, in tokens")
    parser.add_argument("--kill", action="store_true", help="kill workers after the other phases")
    arguments = parser.parse_args()
    phases = [phase for phase in PHASES if not arguments.phase or phase.number in arguments.phase]
    phases += KILLS if arguments.kill else ()
    chunks = CHUNKS[arguments.chunks]
    with (
        bench_directory() as directory,
        BatonServer.started(directory, more=(*RELEASE_SETTINGS, *chunks_of(chunks))) as server,
    ):
        say(f"seed {arguments.seed}, {arguments.rounds} clients for each phase, chunks {chunks}")
        say(f"{'phase':<58}{'n':>5}{'median':>9}{'worst':>9}{'a scrape':>10}   ms")
        asyncio.run(_measure(server, phases, arguments.rounds, random.Random(arguments.seed)))


async def _measure(
    server: BatonServer, phases: list[Phase], rounds: int, rng: random.Random
) -> None:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=HANG_S) as client:
        leaving = Leaving(server, client, rng)
        for phase in phases:
            releases = [release async for release in leaving.rounds(phase, rounds)]
            say(_line(phase, releases))


def _line(phase: Phase, releases: list[Release]) -> str:
    name = f"{phase.number} {phase.name}"
    if not releases:
        return f"{name:<58}    0: no client left in it"
    times = [1e3 * release.seconds for release in releases]
    scrape = statistics.median(1e3 * release.scrape_s for release in releases)
    median = statistics.median(times)
    return f"{name:<58}{len(times):>5}{median:>9.0f}{max(times):>9.0f}{scrape:>10.0f}"


if __name__ == "__main__":
    main()
