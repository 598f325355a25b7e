"""Figures as text for people and as JSON for programs. Pure.

Milliseconds and percent are for people only: JSON has seconds and shares, under names that end in
their unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deployments.bench.cpu import CpuUse
from deployments.bench.interference import InterferenceSummary, Phase
from deployments.bench.measure import Distribution, Goodput, Summary
from deployments.bench.session import PointResult, Report, VersusResult
from deployments.bench.versus import Comparison
from deployments.terminal.tables import format_columns

__all__ = ["point_as_text", "report_as_json", "servers_as_text", "versus_as_text"]

_FEW_SAMPLES = 100
"""Below this many, a p99 is about the largest of the values."""


def servers_as_text(report: Report) -> str:
    """What is measured, and the seed that gives the same prompts again."""
    lines = [f"{server.name}  {server.address}  {server.model}" for server in report.servers]
    return "\n".join([*lines, f"seed {report.seed}"])


def point_as_text(point: PointResult) -> str:
    """One load on one server."""
    summary = point.summary
    body = _load_lines(summary) if isinstance(summary, Summary) else _interference_lines(summary)
    cut = [f"  lengths of {point.num_cut} requests were cut to a limit"] if point.num_cut else []
    return "\n".join([point.label, *body, *cut, _cpu_line(point.cpu)])


def versus_as_text(result: VersusResult) -> str:
    """Both servers' medians and the ratio of each figure with its spread over the rounds."""
    headings = ("", "A", "B", "A / B", "quartiles", "range", "n")
    rows = [headings, *(_comparison_row(found) for found in result.comparisons)]
    lines = [
        f"{result.label}: A against B, medians of {len(result.rounds)} rounds in turns",
        *_indented(format_columns(rows)),
    ]
    if result.num_rounds_cut:
        lines.append(f"  {result.num_rounds_cut} rounds left out: the time was up")
    failures = sum(_num_failed(point.summary) for pair in result.rounds for point in pair)
    if failures:
        lines.append(f"  {failures} requests failed; --json has each round")
    return "\n".join([*lines, *_versus_cpu_lines(result)])


def report_as_json(report: Report) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "options": dict(report.options),
        "seed": report.seed,
        "servers": [asdict(server) for server in report.servers],
        "host": dict(report.host),
        "points": [_point_as_json(point) for point in report.points],
        "versus": [
            {
                "label": result.label,
                "rounds_left_out": result.num_rounds_cut,
                "comparisons": [asdict(found) for found in result.comparisons],
                "rounds": [[_point_as_json(point) for point in pair] for pair in result.rounds],
            }
            for result in report.versus
        ],
        "skipped": list(report.skipped),
    }


def _point_as_json(point: PointResult) -> dict[str, Any]:
    answer = {
        "server": point.server,
        "label": point.label,
        "run": point.run,
        "num_cut": point.num_cut,
        "figures": point.summary.figures(),
        "summary": asdict(point.summary),
        "cpu": asdict(point.cpu),
    }
    if isinstance(point.summary, InterferenceSummary):
        return answer
    answer["requests"] = [
        {
            "index": sample.index,
            "prompt_tokens": sample.prompt_tokens,
            "output_tokens": sample.tokens,
            "ttft_s": sample.ttft_s if sample.text_s else None,
            "e2e_s": sample.e2e_s if sample.text_s else None,
            "itl_max_s": max(sample.gaps_s, default=None),
            "failure": sample.failure and sample.failure.kind,
        }
        for sample in point.samples
    ]
    return answer


def _load_lines(summary: Summary) -> Iterator[str]:
    counts = f"  {summary.num_finished} of {summary.num_sent} requests in {summary.wall_s:.1f} s"
    lengths = [
        f"{name} {mean:.1f}"
        for name, mean in (
            ("prompt", summary.prompt_tokens_mean),
            ("cached", summary.cached_tokens_mean),
            ("output", summary.output_tokens_mean),
        )
        if mean is not None
    ]
    yield counts + (f"; tokens on average: {', '.join(lengths)}" if lengths else "")
    yield from _failure_lines(summary.failures, summary.first_failure)
    yield from _indented(
        format_columns(
            [
                ("ms", "p50", "p90", "p99", "max", "n"),
                *(
                    (name, *_distribution_cells(spread))
                    for name, spread in (
                        ("TTFT", summary.ttft),
                        ("ITL", summary.itl),
                        ("TPOT", summary.tpot),
                        ("E2E", summary.e2e),
                    )
                ),
            ]
        )
    )
    rates = [f"output {summary.output_tokens_per_s:.1f} tokens/s"]
    if summary.total_tokens_per_s is not None:
        rates.append(f"total {summary.total_tokens_per_s:.1f} tokens/s")
    yield f"  {', '.join(rates)}, {summary.requests_per_s:.2f} requests/s"
    if summary.goodput is not None:
        yield _goodput_line(summary.goodput)
    yield from _caution_lines(summary)


def _caution_lines(summary: Summary) -> Iterator[str]:
    if summary.ttft is not None and summary.ttft.n < _FEW_SAMPLES:
        yield f"  with {summary.ttft.n} requests, a p99 of TTFT, TPOT or E2E is about the maximum"
    if summary.tokens_per_chunk is not None and summary.tokens_per_chunk > 1.1:
        yield (
            f"  {summary.tokens_per_chunk:.2f} tokens in a chunk: ITL is between chunks, "
            "TPOT per token"
        )
    if summary.late_max_s > 0.05:
        yield f"  the client itself was up to {_ms(summary.late_max_s)} ms late"


def _interference_lines(summary: InterferenceSummary) -> Iterator[str]:
    phases = (("alone", summary.alone), ("with long prompts", summary.beside))
    headings = ("", "tokens/s", "ITL p50", "p99", "max", "longest gaps ms", "TTFT max")
    yield from _indented(
        format_columns([headings, *(_phase_row(name, phase) for name, phase in phases)])
    )
    kept = "not known" if summary.kept_share is None else _percent(summary.kept_share)
    yield f"  rate kept: {kept}"
    long = summary.beside.long_ttft
    times = f"TTFT p50 {_ms(long.p50)}, max {_ms(long.max)} ms" if long else "none answered"
    yield f"  {summary.beside.num_long_sent} long prompts: {times}"
    for _, phase in phases:
        yield from _failure_lines(phase.failures, phase.first_failure)


def _phase_row(name: str, phase: Phase) -> tuple[str, ...]:
    gaps = [_ms(phase.gaps.p50), _ms(phase.gaps.p99), _ms(phase.gaps.max)] if phase.gaps else []
    return (
        name,
        f"{phase.tokens_per_s:.1f}",
        *(gaps or ["-"] * 3),
        " ".join(map(_ms, phase.longest_gaps_s)) or "-",
        _ms(phase.ttft.max) if phase.ttft else "-",
    )


def _failure_lines(failures: Mapping[str, int], first: str | None) -> Iterator[str]:
    if failures:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
        yield f"  FAILED: {kinds}; the first: {first}"


def _goodput_line(goodput: Goodput) -> str:
    targets = ", ".join(
        f"{target.metric} <= {target.limit_s * 1e3:g} ms" for target in goodput.targets
    )
    return (
        f"  goodput {goodput.requests_per_s:.2f} requests/s, {_percent(goodput.share)} of those "
        f"sent ({targets})"
    )


def _distribution_cells(spread: Distribution | None) -> tuple[str, ...]:
    if spread is None:
        return ("-", "-", "-", "-", "0")
    return (*(map(_ms, (spread.p50, spread.p90, spread.p99, spread.max))), str(spread.n))


def _comparison_row(found: Comparison) -> tuple[str, ...]:
    return (
        _title(found.name),
        _value(found.name, found.a_median),
        _value(found.name, found.b_median),
        f"{found.ratio_median:.3f}",
        f"{found.ratio_quartiles[0]:.3f} - {found.ratio_quartiles[1]:.3f}",
        f"{found.ratio_range[0]:.3f} - {found.ratio_range[1]:.3f}",
        str(found.n),
    )


def _cpu_line(use: CpuUse) -> str:
    parts = [
        f"{name} {'not known' if cores is None else f'{cores:.2f}'}"
        for name, cores in use.servers_cores.items()
    ]
    other = "not known" if use.other_cores is None else f"{use.other_cores:.2f}"
    return f"  cores used: {', '.join([*parts, f'this client {use.own_cores:.2f}'])}; else {other}"


def _versus_cpu_lines(result: VersusResult) -> Iterator[str]:
    uses = [point.cpu for pair in result.rounds for point in pair]
    if not uses:
        return
    others = [use.other_cores for use in uses if use.other_cores is not None]
    yield (
        f"  cores used by anything else: {min(others):.2f} - {max(others):.2f}"
        if others
        else "  cores used by anything else: not known"
    )
    yield f"  cores used by this client: at most {max(use.own_cores for use in uses):.2f}"


def _num_failed(summary: Summary | InterferenceSummary) -> int:
    if isinstance(summary, Summary):
        return sum(summary.failures.values())
    return sum(summary.alone.failures.values()) + sum(summary.beside.failures.values())


def _title(name: str) -> str:
    """`ttft_p50_s` as `TTFT p50, ms`."""
    suffix, unit = next((suffix, unit) for suffix, unit in _UNITS.items() if name.endswith(suffix))
    stem = name.removesuffix(suffix)
    words = (word.upper() if word in _ACRONYMS else word for word in stem.split("_"))
    return " ".join(words) + unit


_UNITS = {"_per_s": "/s", "_share": ", %", "_s": ", ms"}
"""By the end of a figure's name, of which each has one; the longest first."""

_ACRONYMS = frozenset({"ttft", "itl", "tpot", "e2e"})


def _value(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        return f"{value:.2f}"
    return f"{value * 100:.1f}" if name.endswith("_share") else _ms(value)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _indented(text: str) -> Sequence[str]:
    return [f"  {line}" for line in text.splitlines()]
