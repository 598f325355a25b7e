"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Seconds, as `Clock` gives them."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on; returns the new time."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now += seconds
        return self.now
