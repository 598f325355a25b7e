"""Two servers in turns, and what their figures say of each other. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Comparison", "Side", "compare", "turns"]

Side = Literal["A", "B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of both servers over all rounds; ratios are A / B within one round."""

    name: str
    n: int
    """Rounds in which both have the figure."""
    a_median: float
    b_median: float
    ratio_median: float
    ratio_quartiles: tuple[float, float]
    ratio_range: tuple[float, float]


def turns(num_rounds: int) -> list[tuple[int, tuple[Side, Side]]]:
    """(round, who goes first and second): A B, B A, A B, ...

    Whoever goes second meets a warmer machine; in turns that hits both alike.
    """
    return [(number, ("A", "B") if number % 2 == 0 else ("B", "A")) for number in range(num_rounds)]


def compare(rounds: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[Comparison]:
    """Figures that both servers have, in the order of A's first round.

    A round where B's figure is 0 has no ratio and is left out for that figure.
    """
    names = dict.fromkeys(name for a, _ in rounds for name in a)
    return [found for name in names if (found := _compare_one(name, rounds)) is not None]


def _compare_one(
    name: str, rounds: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
) -> Comparison | None:
    pairs = [(a[name], b[name]) for a, b in rounds if name in a and b.get(name)]
    if not pairs:
        return None
    ratios = [a / b for a, b in pairs]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive")
        if len(ratios) > 1
        else [ratios[0]] * 3
    )
    return Comparison(
        name=name,
        n=len(pairs),
        a_median=statistics.median(a for a, _ in pairs),
        b_median=statistics.median(b for _, b in pairs),
        ratio_median=middle,
        ratio_quartiles=(low, high),
        ratio_range=(min(ratios), max(ratios)),
    )
