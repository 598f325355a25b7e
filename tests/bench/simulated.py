"""What benches of simulated workers share: machines, the traces they serve, the command line."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deployments.bench.traces import TraceRow, parse_trace
from tests.sim.one_worker import Request, StepCost, Track

BLOCK_SIZE = 16
LONGEST_OUTPUT = 1024
"""Longer outputs of a trace are cut, for everybody: what the fixed maximum would do to its own."""


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


def at_rate(requests: Sequence[Request], per_s: float) -> list[Request]:
    """The same arrival process, its times stretched to a mean rate."""
    first, last = requests[0].at_s, requests[-1].at_s
    scale = (len(requests) - 1) / per_s / (last - first)
    return [replace(request, at_s=(request.at_s - first) * scale) for request in requests]


def read_options(description: str) -> argparse.Namespace:
    """The command line; `description` is a bench's docstring."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=300, help="of each trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="sources whose name has this in it")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def chosen(
    options: argparse.Namespace, sources: Sequence[Source]
) -> Iterator[tuple[Source, list[Request]]]:
    """The sources that were asked for, each with its requests."""
    data = Path(os.environ.get("BATON_DATA") or "../shared/data") / "traces"
    for source in sources:
        if options.only in source.name:
            rows = parse_trace(source.trace, (data / source.trace).read_text().splitlines())
            yield source, choose(rows, source, options.requests, options.seed)


def write_figures(options: argparse.Namespace, figures: Sequence[Any]) -> None:
    """Every figure of every run, as JSON, where a file was named; each is a dataclass."""
    if options.json is not None:
        report = {
            "options": {"requests": options.requests, "seed": options.seed},
            "runs": [asdict(one) for one in figures],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
