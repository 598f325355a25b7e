"""How a worker's process leaves when Serve takes its replica away: in time, and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ray.serve.context import ReplicaContext

__all__ = ["grace_of", "when_told_to_go"]

_LAST_WORDS_S = 1.0
"""From the end of the last request to that of the process; Serve kills it when its time is up."""


def grace_of(context: ReplicaContext) -> float:
    """Seconds that what runs in a replica has to finish, from when it is told to go."""
    grace_s: float = context._deployment_config.graceful_shutdown_timeout_s
    return max(0.0, grace_s - _LAST_WORDS_S)


def when_told_to_go(call: Callable[[], object]) -> None:
    """Have `call` run on this event loop once Serve begins to stop this process's replica.

    Serve itself tells the replica's own code, by `__del__`, only after the last of its calls has
    ended. Whoever could end them in order would hear of it when there is nothing left to do, or be
    killed before.
    """
    # Loaded in each replica, and not by who builds the application.
    from ray.serve._private.replica import Replica

    loop = asyncio.get_running_loop()
    stop = Replica.perform_graceful_shutdown

    async def tell_and_stop(replica: Replica) -> None:
        loop.call_soon_threadsafe(call)  # Serve's loop is not the replica's own
        await stop(replica)

    Replica.perform_graceful_shutdown = tell_and_stop
