"""Which decode worker takes a request: a hint only, the worker's own reservation decides."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workers.messages import WorkerLoad

__all__ = ["Candidate", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker as one Front sees it."""

    worker: str
    outstanding: int
    """Requests that this Front has there now."""
    load: WorkerLoad
    """As last reported, without this Front's requests."""
    is_silent: bool
    """Nothing came from it for longer than one that lives is quiet."""

    @property
    def is_open(self) -> bool:
        """Whether it would take a request."""
        return self.load.takes_requests and not (self.load.is_leaving or self.is_silent)

    @property
    def _rank(self) -> tuple[int, int, int]:
        """The lower, the better; workers report a moment late, what this Front sent it knows."""
        total = self.outstanding + self.load.requests
        return total, self.load.waiting, -self.load.available_blocks


def choose(
    candidates: Sequence[Candidate], avoid: Collection[str], rng: random.Random
) -> str | None:
    """The better one of two random workers, or None while there is none.

    Two, since the best one by a report that all Fronts have gets all of their requests until the
    next report (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
    A worker that is to be avoided is asked only where no other is left; one that leaves, gives no
    sign of life, or whose engine does not run, never: it is about to be replaced.
    """
    present = [each for each in candidates if each.is_open]
    choice = [each for each in present if each.worker not in avoid] or present
    if not choice:
        return None
    return min(rng.sample(choice, min(2, len(choice))), key=lambda each: each._rank).worker
