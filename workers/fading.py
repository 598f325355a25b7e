"""Averages that forget: what was measured lately counts most. No clock, no I/O."""

from __future__ import annotations

__all__ = ["FadingLine", "FadingRatio"]


class FadingRatio:
    """An amount per weight, such as seconds per token; old weight fades as new weight comes."""

    def __init__(self, *, half_life: float) -> None:
        """What was observed counts half after so much more weight."""
        self._half_life = half_life
        self._amount = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """None before the first weight."""
        return self._amount / self._weight if self._weight > 0 else None

    def observe(self, amount: float, weight: float) -> None:
        """Take in an amount that goes with a weight, which is not negative."""
        kept = 0.5 ** (weight / self._half_life)
        self._amount = self._amount * kept + amount
        self._weight = self._weight * kept + weight


class FadingLine:
    """A cost with a fixed part and a part for each of x things, by least squares over the past.

    Neither part is negative: the line is kept between a flat one and one through the origin, both
    through the mean, so that few or equal points extrapolate to nothing absurd.
    """

    def __init__(self, *, half_life: float) -> None:
        """What was observed counts half after so many more observations."""
        self._kept = 0.5 ** (1 / half_life)
        self._count = 0.0
        self._mean_x = 0.0
        self._mean_y = 0.0
        # Sums of squares and products about the means, updated as West (1979) does it: the
        # difference of two large sums would lose what little two close points differ by.
        self._xx = 0.0
        self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        """Take in what x things cost; neither is negative."""
        old = self._count * self._kept
        self._count = old + 1
        dx = x - self._mean_x
        self._mean_x += dx / self._count
        self._mean_y += (y - self._mean_y) / self._count
        self._xx = self._xx * self._kept + dx * (x - self._mean_x)
        self._xy = self._xy * self._kept + dx * (y - self._mean_y)

    def at(self, x: float) -> float | None:
        """What x things should cost; None before the first observation."""
        if self._count == 0:
            return None
        return self._mean_y + self._slope() * (x - self._mean_x)

    def _slope(self) -> float:
        if self._xx <= 0:
            return 0.0
        steepest = self._mean_y / self._mean_x if self._mean_x > 0 else 0.0
        return min(max(0.0, self._xy / self._xx), steepest)
