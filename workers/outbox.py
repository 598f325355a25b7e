"""What one request's reader is still to be told, and the sign of life while that is nothing."""

from __future__ import annotations

import asyncio

from workers.messages import Heartbeat, WorkerEvent

__all__ = ["Outbox"]


class Outbox:
    """A queue of events that knows whether anything went into it lately; for one event loop."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._is_quiet = True

    def put(self, event: WorkerEvent) -> None:
        """Tell the reader something."""
        self._is_quiet = False
        self._events.put_nowait(event)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat if nothing was put in since the beat before.

        A new outbox counts as quiet: its reader learns who its worker is. A reader that does not
        read gets no second heartbeat on top of the first.
        """
        if self._is_quiet and self._events.empty():
            self._events.put_nowait(heartbeat)
        self._is_quiet = True

    async def get(self) -> WorkerEvent:
        """The next event."""
        return await self._events.get()
