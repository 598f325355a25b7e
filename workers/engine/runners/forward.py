"""What a way of running a model does: a step's rows in, logits out, keys and values in blocks."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.engine.attention.backend import IntArray, StepMetadata
from workers.runner_choice import RunnerTier

__all__ = ["ForwardPass"]


class ForwardPass(Protocol):
    """A model over one pool of blocks; used by one thread at a time."""

    @property
    def tier(self) -> RunnerTier:
        """Which of the ways it is."""

    def logits(self, meta: StepMetadata, rows: IntArray) -> torch.Tensor:
        """Run a step; returns the logits `[len(rows), vocabulary]` of some of its rows.

        Writes the keys and values of all its rows to their slots. With no rows asked for, the head
        has nothing to multiply.
        """
