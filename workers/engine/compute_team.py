"""The threads that compute a step: how many, and each on a core of its own where they take all.

They wait for each other hundreds of times in a step. Whatever else wakes up meanwhile (Front, an
event loop, somebody's program) gets one of their cores, and the kernel may then leave two of them
on the other one: for some milliseconds, or for as long as that runs, all wait for two that take
turns. A thread that stays where it is waits for whoever came, and no longer.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

from workers.engine.openmp import OpenMP

__all__ = ["ComputeTeam"]

_logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")


class ComputeTeam:
    """The OpenMP threads of the thread that calls this, which must always be the same one."""

    def __init__(self, openmp: OpenMP | None = None) -> None:
        """Without an OpenMP to reach them by, threads run wherever the kernel puts them."""
        self._openmp = openmp
        self._cores = sorted(os.sched_getaffinity(0))
        self._size: int | None = None
        self.placed: list[int] = []
        """The kernel's ids of the threads that have a core of their own; all of them or none."""

    def resize(self, threads: int) -> None:
        """Compute with so many threads from now on; a no-op where these are as many already."""
        if threads == self._size:
            return
        # First: a thread that is added may run wherever the one may that adds it.
        self._release()
        torch.set_num_threads(threads)
        self._size = threads
        if self._openmp is not None and threads == len(self._cores) > 1:
            self._place(self._openmp)

    def check(self) -> None:
        """To be called before each step: give up where placing does harm.

        Some kernels use fewer threads for small matrices. OpenMP ends those that are left over, and
        makes new ones for whatever comes next: on the one core of the thread that makes them.
        """
        if not self._all_live():
            self._give_up("they do not last")

    def _place(self, openmp: OpenMP) -> None:
        placed: list[int] = []

        def stay(number: int) -> None:
            with suppress(OSError):  # a core that was there may have gone
                os.sched_setaffinity(0, {self._cores[number]})
                placed.append(threading.get_native_id())

        openmp.in_each(len(self._cores), stay)
        self.placed = placed
        if len(placed) < len(self._cores):
            self._give_up("a core has gone")

    def _give_up(self, why: str) -> None:
        _logger.warning("compute threads run wherever the kernel puts them reason=%s", why)
        self._release()
        self._openmp = None

    def _release(self) -> None:
        """Let every thread of the team run on all cores again."""
        if self._all_live():
            # Not by calling them: that would wait for a core which a neighbour has just taken.
            for thread_id in self.placed:
                os.sched_setaffinity(thread_id, self._cores)
        elif self._openmp is not None:
            self._openmp.in_each(len(self._cores), lambda _: os.sched_setaffinity(0, self._cores))
        self.placed = []

    def _all_live(self) -> bool:
        """Whether all threads that were placed are there; none else has their ids then."""
        return all((_THREADS / str(thread_id)).exists() for thread_id in self.placed)
