"""The memory of other workers of this host, mapped once for all transfers from each of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kv_transfer.handoff import PeerInfo
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.local_socket import watch_process

__all__ = ["ArenaMapping", "PeerArena", "PeerArenas"]


class ArenaMapping(Protocol):
    """Another process's arena, as it is seen from here."""

    def close(self) -> None:
        """Unmap it; safe to repeat."""


Mapped = TypeVar("Mapped", bound=ArenaMapping)


@dataclass(slots=True, kw_only=True)
class PeerArena(Generic[Mapped]):
    """One incarnation's memory, and who keeps it mapped."""

    worker_id: str
    incarnation: str
    mapping: Mapped
    process: int | None
    """A descriptor that shows the end of the process; None if that cannot be seen from here."""
    sessions: int = 0


class PeerArenas(Generic[Mapped]):
    """Peers' arenas, mapped once per incarnation: pages that were read before are read at once.

    An arena is dropped when its process ends, when the worker comes back as another incarnation,
    and, where the end of the process cannot be seen, with its last session; else it would keep a
    dead worker's memory from the host. Belongs to the transfer thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, PeerArena[Mapped]] = {}

    def enter(
        self, peer: PeerInfo, frames: FrameSocket, make: Callable[[], Mapped]
    ) -> PeerArena[Mapped]:
        """The arena of a peer that has just sent its welcome; `leave` must follow.

        `make` maps it, where it is not mapped already.
        """
        arena = self._kept.get(peer.incarnation) or self._map(peer, frames, make)
        arena.sessions += 1
        return arena

    def leave(self, arena: PeerArena[Mapped]) -> None:
        """A session has ended."""
        arena.sessions -= 1
        if arena.sessions == 0 and self._kept.get(arena.incarnation) is not arena:
            arena.mapping.close()

    def close(self) -> None:
        """Drop all of them."""
        for arena in list(self._kept.values()):
            self._drop(arena)

    def _map(
        self, peer: PeerInfo, frames: FrameSocket, make: Callable[[], Mapped]
    ) -> PeerArena[Mapped]:
        arena = PeerArena(
            worker_id=peer.worker_id,
            incarnation=peer.incarnation,
            mapping=make(),
            process=watch_process(frames),
        )
        for other in list(self._kept.values()):
            if other.worker_id == arena.worker_id:
                self._drop(other)
        if arena.process is not None:
            self._kept[arena.incarnation] = arena
            asyncio.get_running_loop().add_reader(arena.process, self._drop, arena)
        return arena

    def _drop(self, arena: PeerArena[Mapped]) -> None:
        assert arena.process is not None, "an arena was kept whose end cannot be seen"
        del self._kept[arena.incarnation]
        asyncio.get_running_loop().remove_reader(arena.process)
        os.close(arena.process)
        if arena.sessions == 0:
            arena.mapping.close()
