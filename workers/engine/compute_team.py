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
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from workers.engine.openmp import OpenMP, loaded_openmp

__all__ = ["ComputeTeam"]

_logger = logging.getLogger(__name__)

_PLACED_BY_USER = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
"""Whoever sets one of these has said where OpenMP's threads run."""
_THREADS = Path("/proc/self/task")


class ComputeTeam:
    """The OpenMP threads of the one thread that calls this."""

    def __init__(
        self, openmp: OpenMP | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        """Threads stay where the kernel puts them without an OpenMP to reach them by."""
        may_place = not _PLACED_BY_USER & environ.keys()
        self._openmp = (openmp or loaded_openmp()) if may_place else None
        self._cores = sorted(os.sched_getaffinity(0)) if self._openmp else []
        self._size: int | None = None
        self._placed: dict[int, int] = {}
        """By its number in the team, the kernel's id of each thread that has a core of its own."""

    @property
    def placed(self) -> Collection[int]:
        """The kernel's ids of the threads that have a core of their own; all of them or none."""
        return self._placed.values()

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
        if all((_THREADS / str(thread_id)).exists() for thread_id in self._placed.values()):
            return
        _logger.warning("compute threads do not last: they run wherever the kernel puts them")
        self._release()
        self._openmp = None

    def _place(self, openmp: OpenMP) -> None:
        placed: dict[int, int] = {}

        def stay(number: int) -> None:
            with suppress(OSError):  # a core that was there may have gone
                os.sched_setaffinity(0, {self._cores[number]})
                placed[number] = threading.get_native_id()

        openmp.in_each(len(self._cores), stay)
        self._placed = placed
        if len(placed) < len(self._cores):
            self._release()
            self._openmp = None

    def _release(self) -> None:
        """Let every thread of the team run on all cores again, those too that were not placed."""

        def roam(_: int) -> None:
            os.sched_setaffinity(0, self._cores)

        if self._placed and self._openmp is not None:
            self._openmp.in_each(len(self._cores), roam)
        self._placed = {}
