"""What handing a prompt over adds to the time to its first token, by prompt length and transport.

    python -m tests.bench.bench_split --rounds 20
    python -m tests.bench.bench_split --transport shm --prompt-tokens 128
    python -m tests.bench.bench_split --prefill-block-size 64  # which decode repacks

A colocated and a split server with the default model in fp32 and one thread for each worker, asked
in turns, one request at a time, each pair with the same fresh prompt; whoever goes second changes
from round to round. Every prompt is handed over, also those that would be computed on decode by
default. Both servers compute in chunks of the same size. Beside it stands what the split server's
metrics say of the same prompts: how long decode waited after the last chunk, from the last grant to
VALID, and how long the whole fetch took, the prompt's computation included.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import httpx

from configs.schema import KVSettings, TransferSettings
from deployments.bench.versus import Side, turns
from tests.tools.baton_server import MODEL, BatonServer
from tests.tools.bench_process import bench_directory, runnable, say
from tests.tools.hearing import Heard, hear

TRANSPORTS = get_args(TransferSettings.model_fields["transport"].annotation)
WINDOW = 2048
OUTPUT_TOKENS = 2
PROMPT_TOKENS = (128, 512, 1500)
HANG_S = 120.0
COMMON = (
    "model.dtype=fp32",
    f"model.max_model_len={WINDOW}",
    "decode.gather_s=0",  # prefill gathers nothing, so that only one side would wait
    "decode.engine.threads=1",
    f"decode.engine.pool_tokens={2 * WINDOW}",
)
SPLIT = (
    *COMMON,
    "prefill.engine.threads=1",
    f"prefill.engine.pool_tokens={2 * WINDOW}",
    "decode.local_prefill_tokens=0",
)

Clients = Mapping[Side, httpx.AsyncClient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt, asked of both; seconds."""

    colocated: float
    split: float
    wait: float
    """Of decode, after the last chunk."""
    fetch: float


Pairs = Mapping[int, Sequence[Pair]]


async def first_token_s(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    """From sending the request to the first text; RuntimeError for any other answer."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    heard = Heard()
    started = time.monotonic()
    await hear(client, body, heard, time.monotonic)
    if heard.ending != "finished" or not heard.times:
        raise RuntimeError(f"not answered: {heard}")
    return heard.times[0] - started


async def in_turns(
    clients: Clients, server: BatonServer, rounds: int, lengths: Sequence[int], seed: str
) -> Pairs:
    """By prompt length; `server` is the split one. The first round of all is left out."""
    rng = random.Random(seed)
    pairs: dict[int, list[Pair]] = defaultdict(list)
    wait, fetch = await waited_and_fetched_s(server)
    for number, order in turns(rounds + 1):
        for length in lengths:
            prompt = rng.choices(range(300, 20_000), k=length)
            seconds = {side: await first_token_s(clients[side], prompt) for side in order}
            wait_before, fetch_before = wait, fetch
            wait, fetch = await waited_and_fetched_s(server)
            pair = Pair(
                colocated=seconds["A"],
                split=seconds["B"],
                wait=wait - wait_before,
                fetch=fetch - fetch_before,
            )
            if number > 0:
                pairs[length].append(pair)
    return pairs


async def waited_and_fetched_s(server: BatonServer) -> tuple[float, float]:
    """Of all prompts so far."""
    now = await asyncio.to_thread(server.scrape)
    return (
        now.value("baton_handoff_wait_seconds_sum"),
        now.value("baton_handoff_fetch_seconds_sum"),
    )


def line(transport: str, length: int, pairs: Sequence[Pair]) -> str:
    """Medians of both, and the median and quartiles of what was added within a pair."""
    added = [1e3 * (pair.split - pair.colocated) for pair in pairs]
    low, middle, high = statistics.quantiles(added, n=4, method="inclusive")
    waits = [1e3 * pair.wait for pair in pairs]
    low_wait, middle_wait, high_wait = statistics.quantiles(waits, n=4, method="inclusive")
    colocated, split, fetch = (
        1e3 * statistics.median(seconds)
        for seconds in zip(*((one.colocated, one.split, one.fetch) for one in pairs), strict=True)
    )
    return (
        f"{transport:<10}{length:>8}{len(pairs):>5}{colocated:>11.1f}{split:>9.1f}{middle:>+9.1f}"
        f"   {f'[{low:+.1f}, {high:+.1f}]':<20}{middle_wait:>7.2f}"
        f"   {f'[{low_wait:.2f}, {high_wait:.2f}]':<18}{fetch:>8.1f}"
    )


async def measure(
    colocated: BatonServer, split: BatonServer, rounds: int, lengths: Sequence[int], seed: str
) -> Pairs:
    """Both servers in turns; RuntimeError if not every prompt was handed over."""
    async with (
        httpx.AsyncClient(base_url=colocated.base_url, timeout=HANG_S) as one,
        httpx.AsyncClient(base_url=split.base_url, timeout=HANG_S) as other,
    ):
        pairs = await in_turns({"A": one, "B": other}, split, rounds, lengths, seed)
    placed = split.scrape().by_label("baton_prompts_placed_total", "place")
    if set(placed) != {"remote"}:
        raise RuntimeError(f"not all prompts were handed over: {placed}")
    return pairs


def _started(stack: ExitStack, folder: Path, preset: str, settings: Sequence[str]) -> BatonServer:
    folder.mkdir()
    return stack.enter_context(BatonServer.started(folder, preset=preset, settings=settings))


def main() -> None:
    """Print a line for each transport and prompt length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--prompt-tokens", type=int, action="append")
    parser.add_argument("--prefill-block-size", type=int, default=KVSettings().block_size)
    arguments = parser.parse_args()
    lengths = arguments.prompt_tokens or PROMPT_TOKENS
    rounds = max(2, arguments.rounds)
    with bench_directory() as directory, ExitStack() as stack:
        colocated = _started(stack, directory / "colocated", "colocated", COMMON)
        say(f"seed {arguments.seed}; first token, medians in ms")
        names = f"{'transport':<10}{'prompt':>8}{'n':>5}{'colocated':>11}{'split':>9}{'added':>9}"
        say(f"{names}   {'quartiles':<20}{'wait':>7}   {'quartiles':<18}{'fetch':>8}")
        for transport in arguments.transport or runnable(TRANSPORTS):
            with ExitStack() as one:
                settings = (
                    *SPLIT,
                    f"transfer.transport={transport}",
                    f"prefill.block_size={arguments.prefill_block_size}",
                )
                split = _started(one, directory / transport, "local", settings)
                # The colocated server is the same for all, and must not find an earlier prompt.
                seed = f"{arguments.seed} {transport}"
                pairs = asyncio.run(measure(colocated, split, rounds, lengths, seed))
            say("\n".join(line(transport, length, found) for length, found in pairs.items()))


if __name__ == "__main__":
    main()
