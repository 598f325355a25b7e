"""How long a stream pauses when its decode worker is killed or stops; are its tokens the same?

    python -m tests.bench.bench_resume --rounds 10
    python -m tests.bench.bench_resume --case "killed, another is there"

The default model in fp32; greedy and sampled streams in turns. The tokens are compared, by their
ids, with those of a colocated worker that nothing happened to; the pause is the longest gap between
two pieces of text that the client saw, and beside it stands the median gap of the same stream.
Exits with 1 unless all are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fakes.until import until
from tests.tools.baton_server import MODEL, BatonServer
from tests.tools.bench_process import bench_directory, say
from tests.tools.faults import stopped
from tests.tools.golden import Answer, golden_answers, greedy_or_sampled
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from tests.tools.scrape import Scrape

WINDOW = 512
OUTPUT_TOKENS = 64
HIT_AFTER = 8
"""Pieces of text that the client has by then."""
STOP_ALONE_S = 5.0
"""How long the only worker does nothing: longer than it may be silent."""
WATCH_S = 0.4
HANG_S = 180.0
COMMON = ("model.dtype=fp32", f"model.max_model_len={WINDOW}", "decode.engine.threads=1")
SETTINGS = (
    *COMMON,
    "prefill.engine.threads=1",
    f"decode.engine.pool_tokens={2 * WINDOW}",
    f"prefill.engine.pool_tokens={2 * WINDOW}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What happens to the worker that has the stream."""

    name: str
    replicas: int
    is_killed: bool


CASES = (
    Case(name="killed, another is there", replicas=2, is_killed=True),
    Case(name="silent, another is there", replicas=2, is_killed=False),
    Case(name="killed, it was the only one", replicas=1, is_killed=True),
    Case(name=f"silent for {STOP_ALONE_S:g} s, it is the only one", replicas=1, is_killed=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One stream to which it happened."""

    pause_s: float
    gap_s: float
    is_greedy: bool
    is_same: bool
    ending: str


def bodies(rounds: int, seed: int) -> list[dict[str, Any]]:
    """Greedy and sampled requests in turns, of prompts that are handed over.

    Those of another seed have other prompts, and draw by other seeds of their own.
    """
    days = [f"Day {day}: the keeper saw {day * 3} ships." for day in range(1, 16)]
    return [
        {
            "model": MODEL,
            "prompt": f"Light {number}. " + " ".join(days),
            "max_tokens": OUTPUT_TOKENS,
            **greedy_or_sampled(number),
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            **TOKEN_IDS,
        }
        for number in range(seed, seed + rounds)
    ]


async def one_round(server: BatonServer, case: Case, body: dict[str, Any], answer: Answer) -> Round:
    """Hit the worker of one stream; returns once all workers are back."""
    await asyncio.to_thread(server.wait_for, _all_there(case), timeout_s=HANG_S, what="all there")
    heard = Heard()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=HANG_S) as client:
        asking = asyncio.create_task(hear(client, body, heard, time.monotonic))
        await until(lambda: len(heard.times) >= HIT_AFTER or asking.done(), timeout_s=HANG_S)
        pid = await _busiest(server.replica_pids("Decode"))
        num_before = len(heard.times)
        async with AsyncExitStack() as stack:
            if case.is_killed:
                os.kill(pid, signal.SIGKILL)
            else:
                await stack.enter_async_context(stopped(pid))
            if not case.is_killed and case.replicas == 1:
                await asyncio.sleep(STOP_ALONE_S)
            else:
                await asyncio.wait({asking})
        await asking
    gaps = [later - earlier for earlier, later in pairwise(heard.times)]
    return Round(
        pause_s=max(gaps[num_before - 1 :]),
        gap_s=statistics.median(gaps),
        is_greedy=body["temperature"] == 0,
        is_same=heard.ending == "finished" and answer.is_that_of(heard),
        ending=heard.ending,
    )


def _all_there(case: Case) -> Any:
    def is_there(now: Scrape) -> bool:
        return now.is_idle() and len(now.workers("decode")) == case.replicas

    return is_there


async def _busiest(pids: Sequence[int]) -> int:
    """The process that has the only stream: it is the one that computes."""
    before = {pid: _cpu_s(pid) for pid in pids}
    await asyncio.sleep(WATCH_S)
    return max(pids, key=lambda pid: _cpu_s(pid) - before[pid])


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _measure(directory: Path, cases: Sequence[Case], asked: Sequence[dict[str, Any]]) -> bool:
    """Print a line for each case; whether every token was the right one."""
    is_right = True
    answers = await golden_answers(COMMON, asked)
    for case in cases:
        replicas = (f"decode.replicas={case.replicas}",)
        with BatonServer.started(directory, settings=SETTINGS, more=replicas) as server:
            found = []
            for body, answer in zip(asked, answers, strict=True):
                found.append(await one_round(server, case, body, answer))
            lost = server.scrape().by_label("baton_lost_attempts_total", "cause")
        say(_line(case, found) + f"   lost: {lost}")
        is_right &= all(one.is_same for one in found)
    return is_right


def _line(case: Case, found: Sequence[Round]) -> str:
    pauses = [one.pause_s for one in found]
    same = f"{_same(found, is_greedy=True)} greedy, {_same(found, is_greedy=False)} sampled"
    others = sorted({one.ending for one in found} - {"finished"})
    return (
        f"{case.name:<40}{len(found):>4}{statistics.median(pauses):>9.2f}{max(pauses):>9.2f}"
        f"{statistics.median(one.gap_s for one in found):>9.3f}   same {same}"
        f"{' ' + str(others) if others else ''}"
    )


def _same(found: Sequence[Round], *, is_greedy: bool) -> str:
    """How many streams of a kind had the right tokens, of how many."""
    kind = [one.is_same for one in found if one.is_greedy is is_greedy]
    return f"{sum(kind)}/{len(kind)}"


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="streams for each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    with bench_directory() as directory:
        say(f"seed {arguments.seed}, {arguments.rounds} streams for each case, fp32")
        what = "what happens to its decode worker"
        say(f"{what:<40}{'n':>4}{'pause':>9}{'worst':>9}{'gap':>9}   s")
        asked = bodies(arguments.rounds, arguments.seed)
        is_right = asyncio.run(_measure(directory, cases, asked))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
