"""From what was seen of each request to the figures of a load. Pure.

Times are seconds of one clock that only goes forward. TTFT is from sending to the first text, E2E
to the last; ITL is each gap between two chunks with text; TPOT is (E2E - TTFT) / (tokens - 1) and
stays right where a server puts several tokens into a chunk. Tokens are the server's count where it
gives one, else chunks with text.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from deployments.bench.errors import BenchInputError

__all__ = [
    "Distribution",
    "Failure",
    "Goodput",
    "Sample",
    "Summary",
    "Target",
    "parse_target",
    "quantile",
    "summarize",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request did not finish."""

    kind: str
    """One of few, to be counted: timeout, connect, http 429, ..."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was seen of one request."""

    index: int
    sent_s: float
    ended_s: float
    text_s: tuple[float, ...] = ()
    """When each chunk with text arrived; at least one where the request did not fail."""
    late_s: float = 0.0
    """How long after it was due it was sent: the client's own delay."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server found in its prefix cache, where it says."""
    failure: Failure | None = None

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return len(self.text_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        """From sending to the first text; only where there was text."""
        return self.text_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last text; only where there was text."""
        return self.text_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between chunks with text."""
        return tuple(b - a for a, b in itertools.pairwise(self.text_s))

    @property
    def tpot_s(self) -> float | None:
        """Time for each token after the first; None where all came at once."""
        if len(self.text_s) < 2 or self.tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Values in few numbers; seconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None where there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            n=len(ordered),
            mean=fmean(ordered),
            p50=quantile(ordered, 0.5),
            p90=quantile(ordered, 0.9),
            p99=quantile(ordered, 0.99),
            max=ordered[-1],
        )

    def figures(self, name: str) -> dict[str, float]:
        """Its quantiles and maximum under names with their unit, as in ttft_p50_s."""
        parts = {"p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max}
        return {f"{name}_{part}_s": value for part, value in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request must meet to count as good."""

    metric: str
    """ttft, itl (every gap of it), tpot or e2e."""
    limit_s: float

    def is_met_by(self, sample: Sample) -> bool:
        """Whether a request that finished met it; one token has no gap, and so meets itl."""
        return _MEASURED[self.metric](sample) <= self.limit_s


_MEASURED: Mapping[str, Callable[[Sample], float]] = {
    "ttft": lambda sample: sample.ttft_s,
    "itl": lambda sample: max(sample.gaps_s, default=0.0),
    "tpot": lambda sample: sample.tpot_s or 0.0,
    "e2e": lambda sample: sample.e2e_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that met all targets."""

    targets: tuple[Target, ...]
    requests_per_s: float
    share: float
    """Of all that were sent, failed ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one load; latencies are of requests that finished."""

    num_sent: int
    num_finished: int
    failures: Mapping[str, int]
    """How many, by kind."""
    first_failure: str | None
    wall_s: float
    prompt_tokens_mean: float | None
    cached_tokens_mean: float | None
    output_tokens_mean: float | None
    tokens_per_chunk: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    """Prompt and output; None where the server does not count prompts."""
    late_max_s: float
    goodput: Goodput | None

    def figures(self) -> dict[str, float]:
        """Every number that two servers can be compared by, under its name with its unit."""
        found: dict[str, float] = {}
        latencies = {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e}
        for name, spread in latencies.items():
            if spread is not None:
                found |= spread.figures(name)
        found["output_tokens_per_s"] = self.output_tokens_per_s
        if self.total_tokens_per_s is not None:
            found["total_tokens_per_s"] = self.total_tokens_per_s
        found["requests_per_s"] = self.requests_per_s
        if self.goodput is not None:
            found["goodput_per_s"] = self.goodput.requests_per_s
            found["good_share"] = self.goodput.share
        return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values lie below; between two of them in proportion."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def parse_target(text: str) -> Target:
    """`ttft:500` as a target of 500 ms."""
    metric, _, limit = text.partition(":")
    try:
        limit_s = float(limit) / 1000
    except ValueError:
        limit_s = 0.0
    if metric not in _MEASURED or not limit_s > 0:
        raise BenchInputError(
            f"A target is one of {', '.join(_MEASURED)} with milliseconds, as in ttft:500; "
            f"this is {text!r}."
        )
    return Target(metric=metric, limit_s=limit_s)


def summarize(
    samples: Sequence[Sample], *, wall_s: float, targets: Sequence[Target] = ()
) -> Summary:
    """Figures of the requests of a load, which took wall_s from the first sent to the last end."""
    finished = [sample for sample in samples if sample.failure is None]
    failures = [sample.failure for sample in samples if sample.failure is not None]
    output_tokens = sum(sample.tokens for sample in finished)
    num_chunks = sum(len(sample.text_s) for sample in finished)
    prompts = _known(sample.prompt_tokens for sample in finished)
    cached = _known(sample.cached_tokens for sample in finished)
    return Summary(
        num_sent=len(samples),
        num_finished=len(finished),
        failures=dict(Counter(failure.kind for failure in failures)),
        first_failure=failures[0].message if failures else None,
        wall_s=wall_s,
        prompt_tokens_mean=fmean(prompts) if prompts else None,
        cached_tokens_mean=fmean(cached) if cached else None,
        output_tokens_mean=output_tokens / len(finished) if finished else None,
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        ttft=Distribution.of(sample.ttft_s for sample in finished),
        itl=Distribution.of(gap for sample in finished for gap in sample.gaps_s),
        tpot=Distribution.of(_known(sample.tpot_s for sample in finished)),
        e2e=Distribution.of(sample.e2e_s for sample in finished),
        requests_per_s=len(finished) / wall_s,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(
            (sum(prompts) + output_tokens) / wall_s if len(prompts) == len(finished) else None
        ),
        late_max_s=max((sample.late_s for sample in samples), default=0.0),
        goodput=_goodput(samples, wall_s, tuple(targets)) if targets else None,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _goodput(samples: Sequence[Sample], wall_s: float, targets: tuple[Target, ...]) -> Goodput:
    num_good = sum(
        sample.failure is None and all(target.is_met_by(sample) for target in targets)
        for sample in samples
    )
    share = num_good / len(samples) if samples else 0.0
    return Goodput(targets=targets, requests_per_s=num_good / wall_s, share=share)
