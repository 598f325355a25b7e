"""The promise that what is held is released within a second of the cause being known, as a bound.

Nothing that a release waits for takes as long as a millisecond here, so that what takes a second
waits for a timer. Only a host that did not run the test for a second looks the same; it does not do
so each time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from tests.fakes.until import until

__all__ = ["RELEASE_S", "assert_released_in_time", "seconds_until"]

RELEASE_S = 1.0
_TRIES = 3


async def seconds_until(is_released: Callable[[], bool]) -> float:
    """How long it takes from now, when the cause is known or about to be."""
    known_at = time.monotonic()
    await until(is_released)
    return time.monotonic() - known_at


async def assert_released_in_time(release: Callable[[], Awaitable[float]]) -> None:
    """`release` holds something, brings the cause about, and says how long it was held then."""
    times: list[float] = []
    while len(times) < _TRIES and not (times and times[-1] <= RELEASE_S):
        times.append(await release())
    assert times[-1] <= RELEASE_S, f"held for {times} s after the cause was known"
