"""How often to look for work that announces itself to nobody."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["PollPace"]

_BUSY_S = 0.002
_SHARE = 8
_SHORTEST_S = 0.001  # an event loop sleeps for whole milliseconds


class PollPace:
    """At once while something has just happened, then ever more rarely, up to a limit.

    A wait is an eighth of the time in which nothing has happened: whatever takes long is found at
    most that share late, and what is idle costs what the limit costs.
    """

    def __init__(self, *, idle_s: float, clock: Callable[[], float]) -> None:
        """Never wait longer than `idle_s`; `clock` is monotonic seconds."""
        self._idle_s = idle_s
        self._clock = clock
        self._stirred_at = clock()

    @property
    def quiet_s(self) -> float:
        """Seconds in which nothing has happened."""
        return self._clock() - self._stirred_at

    def stir(self) -> None:
        """Something has happened, or is about to."""
        self._stirred_at = self._clock()

    def delay_s(self) -> float:
        """Seconds to wait before the next look; 0 is after whoever else is ready."""
        quiet_s = self.quiet_s
        if quiet_s < _BUSY_S:
            return 0.0
        return min(max(quiet_s / _SHARE, _SHORTEST_S), self._idle_s)
