"""What steady streams keep of their rate while long prompts arrive: plan and figures. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deployments.bench.measure import Distribution, Sample
from deployments.bench.workload import Lengths, Load, PlannedRequest

__all__ = ["Interference", "InterferenceSummary", "Phase", "measure_phase"]

_LONGEST_GAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Steady streams for duration_s alone, then as long with a long prompt each period_s."""

    streams: int
    steady: Lengths
    long: Lengths
    period_s: float
    duration_s: float

    @property
    def label(self) -> str:
        """What the report calls it."""
        return (
            f"{self.streams} streams, a prompt of {self.long.prompt_tokens} every "
            f"{self.period_s:g} s"
        )

    def steady_requests(self) -> Iterator[PlannedRequest]:
        """Without end: the streams take the next as they need it."""
        index = 0
        while True:
            yield _planned(index, self.steady, 0.0)
            index += 1

    def long_prompts(self) -> Load:
        """The first after one period, none at the very end."""
        dues_s: list[float] = []
        while (due_s := (len(dues_s) + 1) * self.period_s) < self.duration_s:
            dues_s.append(due_s)
        return Load(
            label=self.label,
            requests=tuple(_planned(index, self.long, due) for index, due in enumerate(dues_s)),
            concurrency=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The steady streams within one phase's window, and the long prompts sent in it."""

    tokens_per_s: float
    """Of all streams together."""
    gaps: Distribution | None
    longest_gaps_s: tuple[float, ...]
    """The longest first."""
    ttft: Distribution | None
    """Of the steady requests: a stall may hit their start instead of a gap."""
    num_long_sent: int
    long_ttft: Distribution | None
    failures: Mapping[str, int]
    first_failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceSummary:
    """Both phases side by side."""

    alone: Phase
    beside: Phase

    @property
    def kept_share(self) -> float | None:
        """Tokens per second with long prompts over those without; None where there were none."""
        if not self.alone.tokens_per_s:
            return None
        return self.beside.tokens_per_s / self.alone.tokens_per_s

    def figures(self) -> dict[str, float]:
        """Every number that two servers can be compared by, under its name with its unit."""
        found: dict[str, float] = {}
        if self.kept_share is not None:
            found["kept_share"] = self.kept_share
        for name, phase in (("alone", self.alone), ("beside", self.beside)):
            found[f"{name}_tokens_per_s"] = phase.tokens_per_s
            if phase.gaps is not None:
                found |= phase.gaps.figures(f"{name}_itl")
            if phase.ttft is not None:
                found[f"{name}_ttft_max_s"] = phase.ttft.max
        if self.beside.long_ttft is not None:
            found |= self.beside.long_ttft.figures("long_ttft")
        return found


def measure_phase(
    steady: Sequence[Sample], long: Sequence[Sample], *, started_s: float, duration_s: float
) -> Phase:
    """Figures of one phase: tokens that arrived in its window, and gaps that began in it.

    A gap counts whole where it ends after the window: it is the stall that the window saw begin.
    """
    until_s = started_s + duration_s
    gaps = [
        gap
        for sample in steady
        for gap, began_s in zip(sample.gaps_s, sample.text_s, strict=False)
        if began_s <= until_s
    ]
    failures = [sample.failure for sample in (*steady, *long) if sample.failure is not None]
    return Phase(
        tokens_per_s=sum(_tokens_until(sample, until_s) for sample in steady) / duration_s,
        gaps=Distribution.of(gaps),
        longest_gaps_s=tuple(heapq.nlargest(_LONGEST_GAPS, gaps)),
        ttft=_ttft(steady),
        num_long_sent=len(long),
        long_ttft=_ttft(long),
        failures=dict(Counter(failure.kind for failure in failures)),
        first_failure=failures[0].message if failures else None,
    )


def _tokens_until(sample: Sample, until_s: float) -> float:
    """Tokens that had arrived by then; those of a request are spread evenly over its chunks."""
    if not sample.text_s:
        return 0.0
    num_chunks = sum(arrived_s <= until_s for arrived_s in sample.text_s)
    return num_chunks * sample.tokens / len(sample.text_s)


def _ttft(samples: Sequence[Sample]) -> Distribution | None:
    return Distribution.of(sample.ttft_s for sample in samples if sample.text_s)


def _planned(index: int, lengths: Lengths, due_s: float) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        due_s=due_s,
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
    )
