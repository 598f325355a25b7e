"""Who is connected to a listener, and who goes when it is full: strangers, so that they keep
nobody out who has something to say. Owns no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["MAX_CONNECTIONS", "Connection", "Doorkeeper"]

MAX_CONNECTIONS = 1024
"""Of one listener."""


class Connection(Protocol):
    """What a listener knows of one connection."""

    @property
    def is_admitted(self) -> bool:
        """Whether the peer has proved to know the deployment's secret; until then a stranger."""


AnyConnection = TypeVar("AnyConnection", bound=Connection)


class Doorkeeper(Generic[AnyConnection]):
    """The connections of one listener, each with the task that serves it; for one event loop."""

    def __init__(self, *, on_stranger: Callable[[], None]) -> None:
        """`on_stranger` is called for each that had to go before it proved itself."""
        self._on_stranger = on_stranger
        self._connections: dict[asyncio.Task[None], AnyConnection] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """Those that serve."""
        return tuple(self._connections)

    @property
    def connections(self) -> tuple[AnyConnection, ...]:
        """Those that are served."""
        return tuple(self._connections.values())

    def makes_room(self) -> bool:
        """Whether one more is let in; if the listener is full, at the cost of a stranger.

        Proofs take milliseconds, so it is the oldest that goes. False if all are admitted.
        """
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        for task, connection in self._connections.items():
            if not connection.is_admitted and not task.cancelling():
                task.cancel()
                self._on_stranger()
                return True
        return False

    def let_in(self, task: asyncio.Task[None], connection: AnyConnection) -> None:
        """A connection is being served."""
        self._connections[task] = connection

    def has_left(self, task: asyncio.Task[None]) -> None:
        """Its task is over."""
        del self._connections[task]
