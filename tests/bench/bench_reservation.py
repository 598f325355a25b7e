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

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.bench.simulated import (
    BLOCK_SIZE,
    CPU,
    GPU,
    LONGEST_OUTPUT,
    Source,
    at_rate,
    chosen,
    read_options,
    write_figures,
)
from tests.sim.on_demand import OnDemandScheduler
from tests.sim.one_worker import (
    Outcome,
    Request,
    SimulatedScheduler,
    simulate,
)
from workers.engine.block_pool import BlockPool
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig

LOADS = (0.5, 0.8, 1.1)
POOL_WINDOWS = (2, 8)
"""Baton's default, and a roomy worker."""
CLIENTS = ("exact", "twice", "1024")


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


def as_client(requests: Sequence[Request], client: str, window: int) -> list[Request]:
    """The same requests from clients that know their output less well."""
    ask: dict[str, Callable[[Request], int]] = {
        "exact": lambda request: request.output_tokens,
        "twice": lambda request: min(2 * request.output_tokens, window - request.prompt_tokens),
        "1024": lambda request: LONGEST_OUTPUT,
    }
    return [replace(request, max_tokens=ask[client](request)) for request in requests]


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
        "| longest pause, p99: on demand | reserved |"
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
            _ratio(row[client], base) for client in CLIENTS
        ]
        pauses = [f"{f.longest_gap_p99_s:.2g} s" for f in (base, row["1024"])]
        cells = [
            source,
            f"{base.pool_tokens // 1024}k",
            f"{load}",
            *goodputs,
            str(base.preemptions),
            *pauses,
        ]
        yield "| " + " | ".join(cells) + " |"


def _ratio(figures: Figures, base: Figures) -> str:
    if base.goodput_per_s == 0:
        return "-"
    return f"{figures.goodput_per_s / base.goodput_per_s:.2f}"


def main() -> None:
    """Measure everything, print the table, write every figure."""
    options = read_options(__doc__)
    figures: list[Figures] = []
    for source, requests in chosen(options, SOURCES):
        per_s = capacity_per_s(source, requests)
        for pool_windows in POOL_WINDOWS:
            for load in LOADS:
                figures += measure(source, requests, pool_windows, load, per_s)
        print(f"{source.name}: load 1 is {per_s:.3g} requests/s", flush=True)
    print(*table(figures), sep="\n")
    write_figures(options, figures)


if __name__ == "__main__":
    main()
