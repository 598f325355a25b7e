"""What the process groups of one worker take of memory beside its pool, when there are most.

Pure. What Baton allocates itself is known. What NCCL does is computed, by its documentation: no GPU
has run it so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kv_transfer.transports.pair_plan import MESSAGE_BYTES, WINDOW
from kv_transfer.transports.pair_table import MAX_PAIRS

__all__ = ["GLOO_BYTES", "NCCL_CHANNELS", "NcclMemory"]

_STAGING_BYTES = WINDOW * MESSAGE_BYTES
"""Of one group, where small blocks are packed: on the host with Gloo, on the GPU with NCCL."""

GLOO_BYTES = MAX_PAIRS * _STAGING_BYTES
"""Of one worker's groups."""

NCCL_CHANNELS = 4
"""What Baton lets a group have, where NCCL would take as many as it finds best: one is served by
one CTA, and `max_ctas` of a group's options bounds those. Chosen for the memory; how much faster
more would be was not measured."""

_DEFAULT_BUFFER_BYTES = 4 * 1024 * 1024
"""Of NCCL_BUFFSIZE."""

_DIRECTIONS = 2
"""A group sends one way, but no documentation says that NCCL keeps no buffer for the other."""

_MAY_ASK_FOR_MORE = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
"""Variables by which NCCL may take more than a program lets it: the largest counts, to be safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMemory:
    """GPU memory of a worker's groups: NCCL's data buffers and Baton's staging.

    Not in it, for no documentation has their size: NCCL's buffers for small messages and its
    kernels.
    """

    channels: int = NCCL_CHANNELS
    buffer_bytes: int = _DEFAULT_BUFFER_BYTES
    """Of one channel and direction."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> NcclMemory:
        """With what a worker's environment changes; what is no number counts as unset."""
        numbers = {name: int(value) for name, value in environ.items() if value.isdecimal()}
        return cls(
            channels=max(NCCL_CHANNELS, *(numbers.get(name, 0) for name in _MAY_ASK_FOR_MORE)),
            buffer_bytes=numbers.get("NCCL_BUFFSIZE", _DEFAULT_BUFFER_BYTES),
        )

    @property
    def group_bytes(self) -> int:
        """Of one group, at each end."""
        return self.channels * _DIRECTIONS * self.buffer_bytes + _STAGING_BYTES

    @property
    def worker_bytes(self) -> int:
        """Of as many groups as a worker keeps."""
        return MAX_PAIRS * self.group_bytes
