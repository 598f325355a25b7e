"""How long things took, counted between bounds: what a histogram of `/metrics` is made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["HANDOFF_BOUNDS_S", "DurationCounts", "Durations"]

HANDOFF_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
"""From blocks in shared memory to a long prompt whose computation is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationCounts:
    """A snapshot of `Durations`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Durations up to the first bound, of the rest those up to the second ..., and the others."""
    total_s: float
    """Of all durations."""

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each bound, infinity last, with how many durations were not above it."""
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            yield bound, so_far


class Durations:
    """Counts durations; for one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Bounds are seconds and ascend."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Something took so long."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total_s += seconds

    def counts(self) -> DurationCounts:
        """Everything so far."""
        return DurationCounts(
            bounds=self._bounds, counts=tuple(self._counts), total_s=self._total_s
        )
