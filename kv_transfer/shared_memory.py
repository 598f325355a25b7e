"""Memory that other processes of this host can read and only its owner can write.

A sealed memory file (memfd): it has no name that could be left behind, cannot change its size under
a reader, and cannot be mapped writable again, not even by its owner. It is gone when the last
process that maps it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import weakref
from pathlib import Path

__all__ = ["SharedMapping", "SharedRegion", "can_share_memory", "sharing_domain"]

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl has no name for it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS = _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_ROOT = Path("/")


class SharedRegion:
    """The owner's side: one writable mapping, and a descriptor to give to readers."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve memory; unwritten pages cost nothing. OSError where it is not allowed."""
        writable = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, size_bytes)
            self._memory = mmap.mmap(writable, size_bytes)
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)
            # Opened anew, for a descriptor keeps the rights that it was opened with.
            self.descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)
        self.size_bytes = size_bytes
        self._closing = weakref.finalize(self, os.close, self.descriptor)

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable; the memory lives as long as any view of it."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Give the descriptor to nobody any more; the memory stays. Safe to repeat."""
        self._closing()


class SharedMapping:
    """A reader's side: another process's region, readable alone."""

    def __init__(self, descriptor: int) -> None:
        """Map the region behind a descriptor, which stays the caller's; OSError if that fails.

        ValueError unless it is sealed: reading beyond the end of a file that shrank would kill the
        reader.
        """
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            raise ValueError("the memory is not sealed against a change of its size")
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._memory)

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Some of the bytes; IndexError if they are not all inside."""
        if not 0 <= start <= start + size_bytes <= self.size_bytes:
            raise IndexError(f"bytes {start}..{start + size_bytes} of {self.size_bytes}")
        return self._bytes[start : start + size_bytes]

    def close(self) -> None:
        """Unmap; no view may be in use. Safe to repeat."""
        self._bytes.release()
        self._memory.close()


def can_share_memory() -> bool:
    """Whether this host lets a process make a region."""
    try:
        SharedRegion(mmap.PAGESIZE).close()
    except OSError:
        return False
    return True


def sharing_domain(root: Path = _ROOT) -> str:
    """Where shared memory reaches from here, in words; empty where that cannot be told.

    Two processes with the same value run under one kernel, see each other's abstract sockets (one
    network namespace) and are the same user: no more is needed to hand a descriptor over.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        network = (root / "proc/self/ns/net").readlink()
    except OSError:
        return ""
    return f"{socket.gethostname()} (boot {boot}, {network}, user {os.geteuid()})"
