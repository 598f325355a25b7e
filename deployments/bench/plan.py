"""What the options of `baton bench` ask for: loads and the source of their prompts.

Reads the files that they name; sends nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.bench.errors import BenchInputError
from deployments.bench.interference import Interference
from deployments.bench.measure import Target
from deployments.bench.prompts import (
    BlockPrompts,
    ListedPrompts,
    PromptSource,
    WordPrompts,
    parse_prompts,
)
from deployments.bench.traces import TraceRow, parse_trace
from deployments.bench.workload import Lengths, Load, closed_load, poisson_load, trace_load

__all__ = ["BenchOptions", "Plan", "Point", "make_plan"]

_MT_BENCH = "mt-bench"
_MT_BENCH_FILE = Path("prompts/mt_bench_questions.jsonl")
_TRACE_SUFFIXES = (".csv", ".jsonl")
_DEFAULT_DATA = "../shared/data"

Point = Load | Interference
"""What is measured as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is to be measured, as the command line says it."""

    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    trace: str | None = None
    interference: Interference | None = None
    num_requests: int = 32
    lengths: Lengths
    shared_prefix_tokens: int = 0
    prompts: str | None = None
    time_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    targets: tuple[Target, ...] = ()
    seed: int
    warmup: int = 2
    timeout_s: float = 300.0
    max_seconds: float = 1800.0
    rounds: int = 4
    """Of two servers in turns; a single server is measured once."""

    def __post_init__(self) -> None:
        chosen = [bool(self.concurrencies), bool(self.rates), bool(self.trace)]
        if sum(chosen) + (self.interference is not None) != 1:
            raise BenchInputError(
                "Choose one of --concurrency, --rate, --trace and --interference."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is sent."""

    points: tuple[Point, ...]
    prompts: PromptSource
    warm_up: Lengths
    """Of requests that are sent first and not counted."""


def make_plan(options: BenchOptions, environ: Mapping[str, str]) -> Plan:
    """The plan, with its files read; BenchInputError where one is not there or not right."""
    rows: tuple[TraceRow, ...] = ()
    if options.trace is not None:
        path = _trace_path(options.trace, environ)
        rows = parse_trace(path.name, _read_lines(path))
    points = tuple(_points(options, rows))
    return Plan(
        points=points,
        prompts=_prompt_source(options, rows, environ),
        warm_up=_warm_up(points[0]),
    )


def _points(options: BenchOptions, rows: tuple[TraceRow, ...]) -> list[Point]:
    if options.interference is not None:
        return [options.interference]
    if options.trace is not None:
        return [
            trace_load(
                rows,
                name=Path(options.trace).stem,
                num_requests=options.num_requests,
                time_scale=options.time_scale,
                max_prompt_tokens=options.max_prompt_tokens,
                max_output_tokens=options.max_output_tokens,
            )
        ]
    if options.rates:
        return [
            poisson_load(
                rate,
                num_requests=options.num_requests,
                lengths=options.lengths,
                rng=random.Random(f"{options.seed}/arrivals {rate:g}"),
            )
            for rate in options.rates
        ]
    return [
        closed_load(concurrency, num_requests=options.num_requests, lengths=options.lengths)
        for concurrency in options.concurrencies
    ]


def _prompt_source(
    options: BenchOptions, rows: tuple[TraceRow, ...], environ: Mapping[str, str]
) -> PromptSource:
    if options.prompts is not None:
        is_shared = options.prompts == _MT_BENCH
        path = _data_file(_MT_BENCH_FILE, environ) if is_shared else Path(options.prompts)
        return ListedPrompts(parse_prompts(path.name, _read_lines(path)))
    if any(row.block_ids for row in rows):
        return BlockPrompts(str(options.seed))
    return WordPrompts(str(options.seed), shared_prefix_tokens=options.shared_prefix_tokens)


def _warm_up(point: Point) -> Lengths:
    """Short answers to a prompt as long as the first that is measured."""
    if isinstance(point, Interference):
        return Lengths(prompt_tokens=point.steady.prompt_tokens, output_tokens=8)
    return Lengths(prompt_tokens=point.requests[0].prompt_tokens, output_tokens=8)


def _trace_path(trace: str, environ: Mapping[str, str]) -> Path:
    """A file of that path, or one of that name in the shared data."""
    if Path(trace).is_file() or "/" in trace or trace.endswith(_TRACE_SUFFIXES):
        return Path(trace)
    folder = _data_file(Path("traces"), environ)
    for suffix in _TRACE_SUFFIXES:
        if (path := folder / f"{trace}{suffix}").is_file():
            return path
    known = ", ".join(sorted(file.stem for file in folder.glob("*.*")))
    raise BenchInputError(f"There is no trace {trace!r} in {folder}; it has: {known or 'none'}.")


def _data_file(relative: Path, environ: Mapping[str, str]) -> Path:
    """A file or folder of the shared data: BATON_DATA, or beside the checkout."""
    folder = Path(environ.get("BATON_DATA") or _DEFAULT_DATA)
    if not (folder / relative).exists():
        raise BenchInputError(
            f"There is no {relative} in {folder.absolute()}. Set BATON_DATA to the folder that "
            "holds it, or name a file of your own."
        )
    return folder / relative


def _read_lines(path: Path) -> list[str]:
    """Lines as files have them: str.splitlines would split at separators that JSON may hold."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchInputError(f"{path} cannot be read: {error}.") from error
