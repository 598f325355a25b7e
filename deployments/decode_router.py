"""Which decode replica takes a request, where the request says which ones it has lost.

A hint only: the replica's own reservation decides whether it takes it. Serve loads the class by its
path in each process that calls the pool.
"""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

__all__ = ["DecodeRouter"]


class DecodeRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve's bases are untyped
    """The shorter queue of two random replicas, of those that a request does not ask to avoid."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See Serve's `RequestRouter`; with nobody else left, an avoided replica is asked again."""
        if pending_request is not None:
            # Without it Serve asks again at once while nobody is there, and its loop stands still.
            pending_request.routing_context.should_backoff = True
        avoided = _avoided(pending_request)
        others = [
            replica for replica in candidate_replicas if replica.replica_id.unique_id not in avoided
        ]
        choice = others or candidate_replicas
        return [random.sample(choice, min(2, len(choice)))] if choice else []


def _avoided(pending_request: PendingRequest | None) -> tuple[str, ...]:
    if pending_request is None or not pending_request.args:
        return ()
    avoided: tuple[str, ...] = getattr(pending_request.args[0], "avoid", ())
    return avoided
