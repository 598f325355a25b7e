"""Takes before each layer the threads that the host's other workers leave at that moment."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.engine.attention.backend import AttentionBackend, LayerScoring, StepMetadata
from workers.engine.compute_team import ComputeTeam

__all__ = ["CoreAwareBackend"]


class CoreAwareBackend:
    """An `AttentionBackend` that sets the number of compute threads wherever a layer comes by."""

    def __init__(self, backend: AttentionBackend, threads: Callable[[], int]) -> None:
        """`threads` says how many to take; it is asked for every layer."""
        self._backend = backend
        self._threads = threads
        self._team = ComputeTeam()

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
