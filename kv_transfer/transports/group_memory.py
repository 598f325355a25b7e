"""What the process groups of one worker take of memory beside its pool, when there are most.

Pure. What Baton allocates itself is known. What NCCL does is computed, by its documentation and its
public sources (`init.cc`, `transport/p2p.cc`, `graph/paths.cc`): no GPU has run it so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kv_transfer.geometry import ceil_div
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

_PROTOCOL_BUFFERS = {
    "NCCL_BUFFSIZE": 4 * 1024 * 1024,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8,  # words a thread, threads, steps, bytes a word
    "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16,  # lines a thread, threads, steps, bytes a line
}
"""Bytes of a channel's buffer for each of NCCL's protocols, which it has whichever it uses; by the
variables that change them."""

_PAGE_BYTES = 2 * 1024 * 1024
"""Of GPU memory: what is allocated is a multiple of it."""

_DIRECTIONS = 2
"""A group sends one way, but nothing says that NCCL keeps no buffer for the other."""

_MAY_ASK_FOR_MORE = (
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_P2P_NCHANNELS",
)
"""Variables by which NCCL may take more than a program lets it: the largest counts, to be safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMemory:
    """GPU memory of a worker's groups: NCCL's buffers and Baton's staging.

    Not in it: NCCL's kernels, and what its configuration files change.
    """

    channels: int = NCCL_CHANNELS
    buffer_bytes: int = sum(_PROTOCOL_BUFFERS.values())
    """Of one channel and direction, for all protocols."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> NcclMemory:
        """With what a worker's environment changes; what is no number counts as unset."""
        asked = [_number(environ.get(name)) or 0 for name in _MAY_ASK_FOR_MORE]
        buffers = [_number(environ.get(name)) or size for name, size in _PROTOCOL_BUFFERS.items()]
        return cls(
            channels=_next_power_of_two(max(NCCL_CHANNELS, *asked)), buffer_bytes=sum(buffers)
        )

    @property
    def group_bytes(self) -> int:
        """Of one group, at each end."""
        paged = ceil_div(self.buffer_bytes, _PAGE_BYTES) * _PAGE_BYTES
        return self.channels * _DIRECTIONS * paged + _STAGING_BYTES

    @property
    def worker_bytes(self) -> int:
        """Of as many groups as a worker keeps."""
        return MAX_PAIRS * self.group_bytes


def _next_power_of_two(number: int) -> int:
    """NCCL rounds the channels of messages between two ranks up to it."""
    return 1 << (number - 1).bit_length()


def _number(text: str | None) -> int | None:
    """A whole number as NCCL reads it, decimal or with 0x; None for anything else."""
    try:
        return int(text or "", 0)
    except ValueError:
        return None
