"""What it costs to reserve a request's whole output at admission, against taking blocks on demand.

    python -m tests.bench.bench_reservation --json reservation.json

Baton's scheduler, pool and queue beside `tests.sim.on_demand`, in one simulated worker that
prefills and decodes, over lengths and arrivals of production traces (`BATON_DATA`). The price
depends on how well clients know their output: `exact` asks for what it will get, `twice` for
double, `1024` for Baton's default whatever it needs. Seeded: the same figures each time.

Load 1 is what the on-demand scheduler does per second in the larger pool when all requests are
there at once. Goodput counts requests that meet both targets of their worker, over the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deployments.bench.traces import TraceRow, parse_trace
from tests.sim.on_demand import OnDemandScheduler
from tests.sim.one_worker import (
    Outcome,
    Request,
    SimulatedScheduler,
    StepCost,
    Track,
    simulate,
)
from workers.engine.block_pool import BlockPool
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig

BLOCK_SIZE = 16
LONGEST_OUTPUT = 1024
"""Longer outputs of a trace are cut, for everybody: what the fixed maximum would do to its own."""
LOADS = (0.5, 0.8, 1.1)
POOL_WINDOWS = (2, 8)
"""Baton's default, and a roomy worker."""
CLIENTS = ("exact", "twice", "1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A machine with a model: what its steps cost and what its clients expect."""

    name: str
    cost: StepCost
    max_sequences: int
    step_tokens: int
    chunk_tokens: int
    ttft_s: float
    """Target beside three times the time that the prompt takes alone."""
    tpot_s: float

    def meets(self, track: Track) -> bool:
        """Whether a request got both of its targets."""
        alone_s = self.cost.alone_s(track.request.prompt_tokens, self.chunk_tokens)
        return track.ttft_s <= self.ttft_s + 3 * alone_s and track.tpot_s <= self.tpot_s


CPU = Worker(
    name="cpu",
    # SmolLM2-135M in bf16 on one core, fitted to measurements on a quiet machine: steps of 1, 4, 16
    # and 64 sequences at 128 tokens (42, 46, 72, 184 ms), of one at 1024 (47 ms), and prompts of
    # 512 and 1500 tokens (0.87 and 3.3 s).
    cost=StepCost(
        base_s=0.0390,
        row_s=0.0015,
        context_s=5.5e-6,
        prompt_token_s=1.5e-3,
        prompt_context_s=0.9e-6,
    ),
    max_sequences=64,
    step_tokens=192,
    chunk_tokens=128,
    ttft_s=5.0,
    tpot_s=0.5,
)
GPU = Worker(
    name="gpu",
    # Given, not measured: 8B dense parameters in bf16 on an 80 GB accelerator by its data sheet. 16
    # GB of weights at 3 TB/s and 1 ms of launching; 16 GFLOP a prompt token at 500 TFLOP/s; 128 KiB
    # of KV a token; 0.5 MFLOP of attention for each token that a prompt token attends to.
    cost=StepCost(
        base_s=6.3e-3,
        row_s=4e-5,
        context_s=4.4e-8,
        prompt_token_s=3.2e-5,
        prompt_context_s=1e-9,
    ),
    max_sequences=256,
    step_tokens=1024,
    chunk_tokens=512,
    ttft_s=1.0,
    tpot_s=0.05,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace on a worker."""

    trace: str
    worker: Worker
    window: int

    @property
    def name(self) -> str:
        """As in tables."""
        return f"{Path(self.trace).stem} on {self.worker.name}"


SOURCES = (
    Source(trace="azure_2023_conv.csv", worker=GPU, window=16_384),
    Source(trace="azure_2023_code.csv", worker=GPU, window=16_384),
    Source(trace="mooncake_conversation.jsonl", worker=GPU, window=131_072),
    Source(trace="mooncake_synthetic.jsonl", worker=GPU, window=131_072),
    Source(trace="azure_2023_conv.csv", worker=CPU, window=16_384),
    Source(trace="azure_2023_code.csv", worker=CPU, window=16_384),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    source: str
    pool_windows: int
    pool_tokens: int
    load: float
    policy: str
    requests: int
    offered_per_s: float
    goodput_per_s: float
    met: float
    """Share of the requests that met both targets."""
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    longest_gap_p99_s: float
    preemptions: int
    recomputed_tokens: int
    held: float
    filled: float
    batch: float


def make_scheduler(source: Source, pool_windows: int, policy: str) -> SimulatedScheduler:
    """On demand, or Baton's own."""
    worker = source.worker
    pool = BlockPool(
        num_blocks=pool_windows * source.window // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=source.window,
    )
    config = SchedulerConfig(
        max_model_len=source.window,
        max_sequences=worker.max_sequences,
        step_tokens=worker.step_tokens + worker.max_sequences,
        prefill_chunk_tokens=worker.chunk_tokens,
        queue_limit=1_000_000,  # nobody is refused: both serve the same requests
    )
    if policy == "on demand":
        return OnDemandScheduler(pool, config)
    return Scheduler(pool, config)


def choose(rows: Sequence[TraceRow], source: Source, count: int, seed: int) -> list[Request]:
    """Consecutive requests that fit the window with any client; max_tokens is exact."""
    longest = source.window - LONGEST_OUTPUT
    fitting = [row for row in rows if row.prompt_tokens <= longest]
    start = random.Random(seed).randrange(max(1, len(fitting) - count))
    return [
        Request(
            at_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=min(row.output_tokens, LONGEST_OUTPUT),
            max_tokens=min(row.output_tokens, LONGEST_OUTPUT),
        )
        for row in fitting[start : start + count]
    ]


def as_client(requests: Sequence[Request], client: str, window: int) -> list[Request]:
    """The same requests from clients that know their output less well."""
    ask: dict[str, Callable[[Request], int]] = {
        "exact": lambda request: request.output_tokens,
        "twice": lambda request: min(2 * request.output_tokens, window - request.prompt_tokens),
        "1024": lambda request: LONGEST_OUTPUT,
    }
    return [replace(request, max_tokens=ask[client](request)) for request in requests]


def at_rate(requests: Sequence[Request], per_s: float) -> list[Request]:
    """The same arrival process, its times stretched to a mean rate."""
    first, last = requests[0].at_s, requests[-1].at_s
    scale = (len(requests) - 1) / per_s / (last - first)
    return [replace(request, at_s=(request.at_s - first) * scale) for request in requests]


def capacity_per_s(source: Source, requests: Sequence[Request]) -> float:
    """Requests a second that the on-demand scheduler does in the larger pool."""
    together = [replace(request, at_s=0.0) for request in requests]
    scheduler = make_scheduler(source, max(POOL_WINDOWS), "on demand")
    outcome = simulate(scheduler, together, source.worker.cost)
    return len(together) / outcome.duration_s


def measure(
    source: Source, requests: Sequence[Request], pool_windows: int, load: float, per_s: float
) -> Iterator[Figures]:
    """One load in one pool, by every policy."""
    arriving = at_rate(requests, per_s * load)
    for policy in ("on demand", *CLIENTS):
        asked = arriving if policy == "on demand" else as_client(arriving, policy, source.window)
        scheduler = make_scheduler(source, pool_windows, policy)
        outcome = simulate(scheduler, asked, source.worker.cost, check_every=1000)
        yield _figures(
            source,
            outcome,
            pool_windows=pool_windows,
            load=load,
            policy=policy,
            offered_per_s=per_s * load,
            scheduler=scheduler,
        )


def _figures(
    source: Source,
    outcome: Outcome,
    *,
    pool_windows: int,
    load: float,
    policy: str,
    offered_per_s: float,
    scheduler: SimulatedScheduler,
) -> Figures:
    tracks = outcome.tracks
    met = sum(map(source.worker.meets, tracks))
    is_on_demand = isinstance(scheduler, OnDemandScheduler)
    return Figures(
        source=source.name,
        pool_windows=pool_windows,
        pool_tokens=pool_windows * source.window,
        load=load,
        policy=policy,
        requests=len(tracks),
        offered_per_s=offered_per_s,
        goodput_per_s=met / outcome.duration_s,
        met=met / len(tracks),
        output_tokens_per_s=sum(track.num_tokens for track in tracks) / outcome.duration_s,
        ttft_p50_s=statistics.median(track.ttft_s for track in tracks),
        ttft_p99_s=_p99([track.ttft_s for track in tracks]),
        tpot_p99_s=_p99([track.tpot_s for track in tracks]),
        longest_gap_p99_s=_p99([track.longest_gap_s for track in tracks]),
        preemptions=scheduler.preemptions if is_on_demand else 0,  # type: ignore[attr-defined]
        recomputed_tokens=scheduler.recomputed_tokens if is_on_demand else 0,  # type: ignore[attr-defined]
        held=outcome.held,
        filled=outcome.filled,
        batch=outcome.batch,
    )


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def table(figures: Sequence[Figures]) -> Iterator[str]:
    """Lines of Markdown: a row for each load, a goodput for each policy and what explains it."""
    yield (
        "| trace, worker | pool | load | on demand | exact | twice | 1024 | preempted "
        "| held, filled on demand | held, filled at 1024 |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    keys = list(dict.fromkeys((f.source, f.pool_windows, f.load) for f in figures))
    for source, pool_windows, load in keys:
        row = {
            f.policy: f
            for f in figures
            if (f.source, f.pool_windows, f.load) == (source, pool_windows, load)
        }
        base = row["on demand"]
        goodputs = [f"{base.goodput_per_s:.3g}/s ({base.met:.0%})"] + [
            f"{_ratio(row[client], base)} ({row[client].met:.0%})" for client in CLIENTS
        ]
        fixed = row["1024"]
        shares = [f"{f.held:.0%}, {f.filled:.0%}" for f in (base, fixed)]
        cells = [
            source,
            f"{base.pool_tokens // 1024}k",
            f"{load}",
            *goodputs,
            str(base.preemptions),
            *shares,
        ]
        yield "| " + " | ".join(cells) + " |"


def _ratio(figures: Figures, base: Figures) -> str:
    if base.goodput_per_s == 0:
        return "-"
    return f"{figures.goodput_per_s / base.goodput_per_s:.2f}x"


def main() -> None:
    """Measure everything, print the table, write every figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=300, help="of each trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="sources whose name has this in it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = Path(os.environ.get("BATON_DATA") or "../shared/data") / "traces"
    figures: list[Figures] = []
    for source in SOURCES:
        if options.only not in source.name:
            continue
        lines = (data / source.trace).read_text().splitlines()
        requests = choose(parse_trace(source.trace, lines), source, options.requests, options.seed)
        per_s = capacity_per_s(source, requests)
        for pool_windows in POOL_WINDOWS:
            for load in LOADS:
                figures += measure(source, requests, pool_windows, load, per_s)
        print(f"{source.name}: load 1 is {per_s:.3g} requests/s", flush=True)
    print(*table(figures), sep="\n")
    if options.json is not None:
        report = {"options": {"requests": options.requests, "seed": options.seed}}
        report["runs"] = [asdict(one) for one in figures]  # type: ignore[assignment]
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
