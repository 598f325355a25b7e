"""Which workers of this host compute at the moment, so that each takes the cores that they leave.

A file in shared memory that every worker of a user maps: an entry each, which says whether its
engine has work. There is nothing to lock when it is read, once per layer of a forward pass, and
nobody waits for anybody: a worker whose neighbour begins to compute gives way at its next layer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

__all__ = ["CoreShare", "join_core_table", "threads_beside"]

SHARES_EVENLY = -1
"""What a worker claims that takes what is there, and gives way to others of its kind."""

_NUM_ENTRIES = 256
_PID, _STARTED, _CLAIM = range(3)  # the columns of an entry, 64 bits each
_SIZE_BYTES = _NUM_ENTRIES * 3 * 8
_SHARED_MEMORY = Path("/dev/shm")  # of whose files we take our own only
_ALIVE_S = 1.0
"""For so long a worker that was seen is taken to live."""


def threads_beside(claims: Sequence[int], *, cores: int) -> int:
    """Threads of one worker that shares evenly, while others compute that claim so many.

    Those with a fixed number keep it; the rest is divided.
    """
    fixed = sum(claim for claim in claims if claim != SHARES_EVENLY)
    sharers = 1 + sum(claim == SHARES_EVENLY for claim in claims)
    return max(1, (cores - fixed) // sharers)


class CoreShare:
    """One worker's entry, and its view of the others'. Any thread may use it."""

    def __init__(self, table: mmap.mmap, entry: int, *, cores: int, fixed_threads: int | None):
        """For an entry that is this process's; see `join_core_table`."""
        self._table = np.frombuffer(table, dtype=np.int64).reshape(_NUM_ENTRIES, 3)
        self._entry = entry
        self._cores = cores
        self._fixed_threads = fixed_threads
        self._seen_alive: dict[tuple[int, int], float] = {}

    def claim(self) -> None:
        """There is something to compute, from now on; safe to repeat."""
        self._table[self._entry, _CLAIM] = self._fixed_threads or SHARES_EVENLY

    def rest(self) -> None:
        """There is nothing to compute, until the next claim; safe to repeat."""
        self._table[self._entry, _CLAIM] = 0

    def threads(self) -> int:
        """Threads to compute with now: some microseconds old at most, and at least one."""
        if self._fixed_threads is not None:
            return self._fixed_threads
        computing = np.flatnonzero(self._table[:, _CLAIM])
        claims = [
            int(self._table[entry, _CLAIM])
            for entry in computing.tolist()
            if entry != self._entry and self._is_alive(entry)
        ]
        return threads_beside(claims, cores=self._cores)

    def _is_alive(self, entry: int) -> bool:
        """Whether its process lives; one that died may have left its claim behind."""
        process = (int(self._table[entry, _PID]), int(self._table[entry, _STARTED]))
        now = time.monotonic()
        if now - self._seen_alive.get(process, -_ALIVE_S) < _ALIVE_S:
            return True
        if _started(process[0]) != process[1]:
            self._table[entry, _CLAIM] = 0  # whoever has it next claims anew with each step
            return False
        self._seen_alive = {process: now} | {
            other: seen for other, seen in self._seen_alive.items() if now - seen < _ALIVE_S
        }
        return True


def join_core_table(
    *, cores: int, fixed_threads: int | None, directory: Path = _SHARED_MEMORY
) -> CoreShare:
    """Take an entry in the table of this user's workers; the process's end gives it back.

    Those with `fixed_threads` are seen by the others and change nothing themselves. Raises OSError
    where there can be no such file, or it has no entry left.
    """
    with _opened(directory / _name()) as descriptor:
        table = mmap.mmap(descriptor, _SIZE_BYTES)
        entries = np.frombuffer(table, dtype=np.int64).reshape(_NUM_ENTRIES, 3)
        for number, (pid, started, _) in enumerate(entries.tolist()):
            if pid == 0 or _started(pid) != started:
                entries[number] = (os.getpid(), _started(os.getpid()), 0)
                return CoreShare(table, number, cores=cores, fixed_threads=fixed_threads)
    raise OSError(f"{_NUM_ENTRIES} workers of this user run on this host already")


def _name() -> str:
    """Of processes that see each other, of one user: containers may share their memory alone."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"baton-cores-{os.geteuid()}-{namespace}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file, locked, and as large as it must be; OSError if it is not ours alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's own")
        os.ftruncate(descriptor, _SIZE_BYTES)
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a map keeps a copy of the descriptor, and its lock
        os.close(descriptor)


def _started(pid: int) -> int:
    """When a process began, in hundredths of a second; 0 if there is none."""
    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.Error:
        return 0
