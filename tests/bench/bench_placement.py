"""What placing prompts by cost gains over a floor alone, and over no split, on the same machines.

    python -m tests.bench.bench_placement --json placement.json

Baton's schedulers and placement rule in simulated pools (`tests.sim.split`), over lengths and
arrivals of Azure's traces of 2023 (`BATON_DATA`). `remote` hands over every prompt above the floor
of 128 tokens, `cost` is the rule, `colocated` has decode workers only, as many machines in all.
Seeded: the same figures each time. Load 1 is what `colocated` does per second when all requests
are there at once. Goodput counts requests that meet both targets of their worker.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.bench.simulated import (
    BLOCK_SIZE,
    CPU,
    GPU,
    Source,
    at_rate,
    chosen,
    read_options,
    write_figures,
)
from tests.sim.one_worker import Request
from tests.sim.split import HandoffCost, Split, SplitConfig
from workers.engine.scheduler_config import SchedulerConfig
from workers.placement import PlacementConfig

RULES = ("remote", "cost", "colocated")
LOADS = (0.3, 0.6, 0.9)
POOLS = ((1, 1), (2, 1))
"""Decode and prefill workers."""
FLOOR_TOKENS = 128
POOL_WINDOWS = 8
HANDOFFS = {
    # Estimated, not measured: some ms to ask, and 0.4 ms a block over shared memory.
    "cpu": HandoffCost(fixed_s=0.010, block_s=0.0004),
    # Given: 128 KiB of KV a token at 12 GB/s, and a round trip or two.
    "gpu": HandoffCost(fixed_s=0.003, block_s=0.00017),
}
SOURCES = (
    Source(trace="azure_2023_conv.csv", worker=GPU, window=16_384),
    Source(trace="azure_2023_code.csv", worker=GPU, window=16_384),
    Source(trace="azure_2023_conv.csv", worker=CPU, window=16_384),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    source: str
    num_decode: int
    num_prefill: int
    load: float
    rule: str
    requests: int
    offered_per_s: float
    goodput_per_s: float
    met: float
    """Share of the requests that met both targets."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    longest_gap_p99_s: float
    there: float
    """Share of the prompts that were handed over."""


def config_of(source: Source, pools: tuple[int, int], rule: str) -> SplitConfig:
    """The machines of one row, under one rule."""
    worker = source.worker
    num_decode, num_prefill = pools
    if rule == "colocated":
        num_decode, num_prefill = num_decode + num_prefill, 0
    return SplitConfig(
        num_decode=num_decode,
        num_prefill=num_prefill,
        scheduler=SchedulerConfig(
            max_model_len=source.window,
            max_sequences=worker.max_sequences,
            step_tokens=worker.step_tokens + worker.max_sequences,
            prefill_chunk_tokens=worker.chunk_tokens,
            queue_limit=1_000_000,  # nobody is refused: all rules serve the same requests
        ),
        num_blocks=POOL_WINDOWS * source.window // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        placement=PlacementConfig(local_prefill_tokens=FLOOR_TOKENS, is_by_cost=rule == "cost"),
        decode_cost=worker.cost,
        prefill_cost=worker.cost,
        handoff=HANDOFFS[worker.name],
    )


def capacity_per_s(source: Source, pools: tuple[int, int], requests: Sequence[Request]) -> float:
    """Requests a second that the machines do without a split."""
    split = Split(config=config_of(source, pools, "colocated"))
    split.serve([replace(request, at_s=0.0) for request in requests])
    return len(requests) / split.duration_s


def measure(
    source: Source, requests: Sequence[Request], pools: tuple[int, int]
) -> Iterator[Figures]:
    """Every load on these machines, by every rule."""
    per_s = capacity_per_s(source, pools, requests)
    for load in LOADS:
        arriving = at_rate(requests, per_s * load)
        for rule in RULES:
            split = Split(config=config_of(source, pools, rule), check_every=1000)
            split.serve(arriving)
            tracks = split.tracks
            met = sum(map(source.worker.meets, tracks))
            ttfts = [track.ttft_s for track in tracks]
            yield Figures(
                source=source.name,
                num_decode=pools[0],
                num_prefill=pools[1],
                load=load,
                rule=rule,
                requests=len(tracks),
                offered_per_s=per_s * load,
                goodput_per_s=met / split.duration_s,
                met=met / len(tracks),
                ttft_p50_s=statistics.median(ttfts),
                ttft_p99_s=_p99(ttfts),
                tpot_p99_s=_p99([track.tpot_s for track in tracks]),
                longest_gap_p99_s=_p99([track.longest_gap_s for track in tracks]),
                there=sum(one.startswith("there") for one in split.placed) / len(tracks),
            )


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def table(figures: Sequence[Figures]) -> Iterator[str]:
    """Lines of Markdown."""
    yield (
        "| trace, worker | decode + prefill | load | rule | met | TTFT p50, p99 s | TPOT p99 s "
        "| longest gap p99 s | handed over |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for f in figures:
        cells = [
            f.source,
            f"{f.num_decode} + {f.num_prefill}",
            f"{f.load}",
            f.rule,
            f"{f.met:.0%}",
            f"{f.ttft_p50_s:.2g}, {f.ttft_p99_s:.2g}",
            f"{f.tpot_p99_s:.2g}",
            f"{f.longest_gap_p99_s:.2g}",
            f"{f.there:.0%}",
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure everything, print the table, write every figure."""
    options = read_options(__doc__)
    figures: list[Figures] = []
    for source, requests in chosen(options, SOURCES):
        for pools in POOLS:
            figures += measure(source, requests, pools)
    print(*table(figures), sep="\n")
    write_figures(options, figures)


if __name__ == "__main__":
    main()
