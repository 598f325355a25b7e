"""Takes before each layer the threads that the host's other workers leave at that moment."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.engine.attention.backend import AttentionBackend, LayerScoring, StepMetadata

__all__ = ["CoreAwareBackend"]


class CoreAwareBackend:
    """An `AttentionBackend` that sets the number of compute threads wherever a layer comes by."""

    def __init__(self, backend: AttentionBackend, threads: Callable[[], int]) -> None:
        """`threads` says how many to take; it is asked for every layer."""
        self._backend = backend
        self._threads = threads
        self._current: int | None = None

    def prepare(self, meta: StepMetadata) -> None:
        """See `AttentionBackend.prepare`."""
        self._adjust()
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
        self._adjust()
        return self._backend.forward(layer_index, q, k, v, scoring)

    def _adjust(self) -> None:
        threads = self._threads()
        if threads != self._current:
            torch.set_num_threads(threads)
            self._current = threads
