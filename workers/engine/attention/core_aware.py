"""Takes before each layer the threads that the host's other workers leave at that moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.engine.attention.backend import AttentionBackend, LayerScoring, StepMetadata
from workers.engine.compute_team import ComputeTeam
from workers.engine.openmp import loaded_openmp

__all__ = ["CoreAwareBackend", "SharedThreads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedThreads:
    """Compute threads whose number others of the host have a say in."""

    count: Callable[[], int]
    """How many there may be at this moment."""
    are_placed: bool = False
    """Whether each has a core of its own while they take all cores."""


class CoreAwareBackend:
    """An `AttentionBackend` that sets the number of compute threads wherever a layer comes by."""

    def __init__(self, backend: AttentionBackend, threads: SharedThreads) -> None:
        """`threads` are asked for their number before every layer."""
        self._backend = backend
        self._threads = threads.count
        self._team = ComputeTeam(loaded_openmp() if threads.are_placed else None)

    def prepare(self, meta: StepMetadata) -> None:
        """See `AttentionBackend.prepare`."""
        self._team.check()
        self._team.resize(self._threads())
        self._backend.prepare(meta)

    def forward(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        self._team.resize(self._threads())
        return self._backend.forward(layer_index, q, k, v, scoring)
