"""The OpenMP that torch computes with, to reach each of its threads, which torch does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["OpenMP", "loaded_openmp"]

_CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUNTIMES = ("libgomp", "libomp", "libiomp")
_MAPS = Path("/proc/self/maps")


class OpenMP:
    """GNU's runtime, by the entry point that compilers call for `#pragma omp parallel`."""

    def __init__(self, library: Any) -> None:
        """For a loaded libgomp; see `loaded_openmp`."""
        self._thread_number = library.omp_get_thread_num
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (_CALLED, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    def in_each(self, threads: int, call: Callable[[int], None]) -> None:
        """Make a call in so many threads of the caller's team, with the number of each.

        Number 0 is the caller. An exception of a call is printed, and lost.
        """
        self._parallel(_CALLED(lambda _: call(self._thread_number())), None, threads, 0)


def loaded_openmp(maps: Path = _MAPS) -> OpenMP | None:
    """This process's runtime, after torch was imported; None unless it is GNU's, and the only one.

    `maps` is what the kernel tells of the files that are mapped.
    """
    try:
        lines = maps.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    mapped = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) > 5}
    runtimes = [path for path in mapped if path.name.startswith(_RUNTIMES)]
    if len(runtimes) != 1 or not runtimes[0].name.startswith("libgomp"):
        return None
    try:
        return OpenMP(ctypes.CDLL(str(runtimes[0])))
    except (OSError, AttributeError):  # without GOMP_parallel: older than GCC 4.9
        return None
