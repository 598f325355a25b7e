"""The store that a process group of two is made over, without a server: each end mirrors the other.

What one end writes goes to the other over the control channel that both already have. So there is
no socket that anybody else could reach, no key that could be left behind, and a wait ends at once
when the channel does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

Publish = Callable[[str, bytes], None]


class StoreClosedError(RuntimeError):
    """The peer has not written what was waited for, and will not."""


class MirroredStore(Store):
    """One end's copy; read and written by the thread that makes the group."""

    def __init__(self, publish: Publish, wait_s: float) -> None:
        """`publish` takes what is written here to the other end; it is called from any thread."""
        super().__init__()
        self._publish = publish
        self._wait_s = wait_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """What the other end has written."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait, now and later; safe to repeat."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # What torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        """Write for both ends."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, content)
        self._publish(key, content)

    def get(self, key: str) -> bytes:
        """What either end has written, once it has; raises `StoreClosedError`."""
        self._wait_for([key], self._wait_s)
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all are there; raises `StoreClosedError`.

        For as long as `get` waits, whatever torch wants: the peer's end may be busy with others.
        """
        self._wait_for(keys, self._wait_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def _wait_for(self, keys: Sequence[str], wait_s: float) -> None:
        def is_decided() -> bool:
            return self._is_closed or all(key in self._entries for key in keys)

        with self._changed:
            self._changed.wait_for(is_decided, wait_s)
            missing = [key for key in keys if key not in self._entries]
        if missing:
            raise StoreClosedError(f"the peer has not written {missing}")
