"""Every hand-off of many, of mixed length, gives the tokens that a colocated worker gives.

    python -m tests.bench.bench_handoffs --transport tcp --requests 1000
    python -m tests.bench.bench_handoffs --transport shm --requests 50 --model default

Two prefill and two decode workers in fp32, behind HTTP; each prompt is asked once, alone, of a
colocated worker in this process, and once of the server, many at a time. Exits with 1 unless all
tokens are the same, by their ids, each prompt that was to be handed over was, and nothing is held
at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import httpx

from configs.schema import TransferSettings
from tests.tools.baton_server import BatonServer
from tests.tools.bench_process import bench_directory, model_for, runnable, say
from tests.tools.chaos import is_quiet
from tests.tools.golden import Answer, golden_answers, greedy_or_sampled
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from tests.tools.scrape import Scrape

TRANSPORTS = get_args(TransferSettings.model_fields["transport"].annotation)
WINDOW = 1024
MAX_OUTPUT_TOKENS = 24
LOCAL_TOKENS = 16
HANG_S = 300.0
COMMON = ("model.name=served", "model.dtype=fp32", f"model.max_model_len={WINDOW}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run has shown."""

    endings: Counter[str]
    wrong: list[str]
    remote: float
    """Prompts that were handed over."""
    scrape: Scrape
    seconds: float


def settings_for(model: str, transport: str) -> tuple[str, ...]:
    """Of the server: everything longer than a block is handed over."""
    return (
        f"model.source={model}",
        *COMMON,
        f"transfer.transport={transport}",
        f"decode.local_prefill_tokens={LOCAL_TOKENS}",
        f"decode.engine.pool_tokens={4 * WINDOW}",
        f"prefill.engine.pool_tokens={4 * WINDOW}",
        "prefill.engine.prefill_chunk_tokens=128",
        "decode.engine.threads=1",
        "prefill.engine.threads=1",
    )


def make_bodies(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Prompts of all lengths that are handed over, greedy and sampled in turns."""
    longest = WINDOW - MAX_OUTPUT_TOKENS
    return [
        {
            "model": "served",
            "prompt": rng.choices(range(300, 20_000), k=rng.randint(LOCAL_TOKENS + 1, longest)),
            "max_tokens": rng.randint(1, MAX_OUTPUT_TOKENS),
            **greedy_or_sampled(index),
            "seed": index,
            "ignore_eos": True,
            "stream": index % 3 == 0,
            **TOKEN_IDS,
        }
        for index in range(number)
    ]


async def ask_all(
    server: BatonServer, bodies: Sequence[dict[str, Any]], answers: Sequence[Answer], at_once: int
) -> Result:
    """Ask everything, `at_once` at a time, and compare."""
    endings: Counter[str] = Counter()
    wrong: list[str] = []
    places = asyncio.Semaphore(at_once)
    started = time.monotonic()
    step = max(1, len(bodies) // 10)

    async def one(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
        heard = Heard()
        async with places:
            await hear(client, body, heard, time.monotonic)
        endings[heard.ending] += 1
        if heard.ending == "finished" and not answer.is_that_of(heard):
            wrong.append(f"{heard}, not {answer}: seed {body['seed']}")
        if endings.total() % step == 0:
            say(f"{time.monotonic() - started:6.0f} s: {dict(endings)}, {len(wrong)} wrong")

    async with httpx.AsyncClient(
        base_url=server.base_url, timeout=HANG_S, limits=httpx.Limits(max_connections=None)
    ) as client:
        await asyncio.gather(*map(one, [client] * len(bodies), bodies, answers))
    seconds = time.monotonic() - started
    last = await asyncio.to_thread(server.wait_for, is_quiet, timeout_s=60, what="quiet")
    remote = last.value("baton_prompts_placed_total", place="remote")
    return Result(endings=endings, wrong=wrong, remote=remote, scrape=last, seconds=seconds)


def report(result: Result) -> bool:
    """Print the figures; whether all is as it must be."""
    num_asked = result.endings.total()
    say(f"{num_asked} requests in {result.seconds:.0f} s: {dict(result.endings)}")
    for name, label in (
        ("baton_prompts_placed_total", "place"),
        ("baton_transfers_total", "outcome"),
        ("baton_transfer_bytes_total", "transport"),
        ("baton_handoff_failures_total", "error"),
    ):
        say(f"{name}: {result.scrape.by_label(name, label)}")
    say(f"answers that are not the colocated one's: {len(result.wrong)} {result.wrong[:3] or ''}")
    say(f"held at the end: {result.scrape.held() or 'nothing'}")
    all_finished = result.endings == Counter({"finished": num_asked})
    return all_finished and not result.wrong and result.remote == num_asked


def main() -> None:
    """Run it for one transport, or for one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--model", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bodies = make_bodies(random.Random(arguments.seed), arguments.requests)
    is_right = True
    with bench_directory() as directory:
        model = model_for(arguments.model, directory)
        overrides = (f"model.source={model}", *COMMON, "decode.engine.threads=1")
        answers = asyncio.run(golden_answers(overrides, bodies))
        for transport in arguments.transport or runnable(TRANSPORTS):
            say(f"--- {transport}, {arguments.model} model, seed {arguments.seed}")
            settings = settings_for(model, transport)
            with BatonServer.started(directory, preset="split-2p2d", settings=settings) as server:
                result = asyncio.run(ask_all(server, bodies, answers, arguments.at_once))
            is_right = report(result) and is_right
    say("all tokens are the same" if is_right else "NOT ALL AS IT MUST BE")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
