"""Gloo for host memory, NCCL for GPUs: what pairs need of each, in its own words."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed
from torch._C._distributed_c10d import Store, Work

from kv_transfer.transport import MemoryKind
from kv_transfer.transports.group_memory import NCCL_CHANNELS
from kv_transfer.transports.process_group import PointToPoint

_ABORT_TAG, _HELLO_TAG = 1, 2
_AT_ONCE = timedelta(milliseconds=1)


class GlooBackend:
    """Groups whose messages go over TCP sockets on one interface.

    Each group has a listening socket and a thread of its own, and ends with them. With one device
    for all groups, as Gloo would have it, a group that gave up connecting left a callback behind
    that points at it: the process died when the connection came after all. A device that connects
    lazily is stopped before its group is freed, and what else it has accepted is closed with it.
    """

    name = "gloo"
    memory: MemoryKind = "host"

    def __init__(self, *, host: str, connect_s: float) -> None:
        """All sockets, listening ones included, are at `host`.

        Gloo waits five times `connect_s` for the connection of a new group.
        """
        self._host = host
        self._connect_s = connect_s

    def make(self, store: Store, rank: int) -> PointToPoint:
        """A group of two, over whose connection both ends have said hello."""
        device = torch.distributed.ProcessGroupGloo.create_device(
            hostname=self._host, lazy_init=True
        )
        # Its public constructor takes no device, and the stub lacks the class of its options.
        options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._connect_s)
        options._threads = 1
        options._devices = [device]
        group = cast(PointToPoint, torch.distributed.ProcessGroupGloo(store, rank, 2, options))
        self._greet(group, 1 - rank)
        return group

    def _greet(self, group: PointToPoint, peer: int) -> None:
        mine, theirs = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        deadline = timedelta(seconds=self._connect_s)
        greetings = [
            group.send([mine], peer, _HELLO_TAG),
            group.recv([theirs], peer, _HELLO_TAG),
        ]
        for greeting in greetings:
            self.finish(greeting, deadline)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory, touched."""
        return torch.from_numpy(np.full(num_bytes, 0, np.uint8))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """By numpy: torch would start threads of its own for each thread that copies."""
        np.copyto(destination.numpy(), source.numpy())

    def finish(self, work: Work, timeout: timedelta) -> None:
        """Block until it is done; past the timeout the whole group is dead."""
        work.wait(timeout)

    def abort(self, group: PointToPoint, peer: int) -> None:
        """Close the connection to the peer, and with it all that waits for it.

        In torch 2.13 `ProcessGroupGloo.abort` does nothing: a posted receive still lands. What does
        close the connection is a deadline that passes: so here is a receive that nobody answers.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # that it timed out, or was closed before
            group.recv([nothing], peer, _ABORT_TAG).wait(_AT_ONCE)


class NcclBackend:
    """Groups whose messages go between GPUs. Written after NCCL's documentation; NOT RUN so far."""

    name = "nccl"
    memory: MemoryKind = "cuda"

    def __init__(self, *, device: int, connect_s: float, interface: str) -> None:
        """On the GPU of this index; `RuntimeError` with the reason where that cannot be.

        Groups connect by the network interface of this name, unless NCCL_SOCKET_IFNAME in the
        environment names another.
        """
        if (obstacle := nccl_obstacle()) is not None:
            raise RuntimeError(obstacle)
        # NCCL has no other way to be told, reads it once, and chooses among all of them without.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._device = torch.device("cuda", device)
        self._connect_s = connect_s

    def make(self, store: Store, rank: int) -> PointToPoint:
        """A group of two; refused where both ranks are on one GPU, before NCCL is asked."""
        mine = str(torch.cuda.get_device_properties(self._device).uuid)
        store.set(f"gpu/{rank}", mine)
        refuse_one_gpu(mine, store.get(f"gpu/{1 - rank}").decode())
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._connect_s)
        # Its buffers, which it has for each channel, are what a group takes of the GPU's memory.
        options.config.max_ctas = NCCL_CHANNELS
        group = torch.distributed.ProcessGroupNCCL(store, rank, 2, options)
        group.eager_connect_single_device(self._device)
        return cast(PointToPoint, group)

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Memory of the GPU."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """On the stream that the next message of this thread waits for, and `finish` as well."""
        destination.copy_(source)

    def finish(self, work: Work, timeout: timedelta) -> None:
        """Block this thread, not only the stream, until the message is there."""
        work.wait(timeout)
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self, group: PointToPoint, peer: int) -> None:
        """Abort the communicator, then wait until the GPU has stopped writing."""
        cast(torch.distributed.ProcessGroupNCCL, group).abort()
        torch.cuda.synchronize(self._device)


def nccl_obstacle() -> str | None:
    """Why NCCL cannot be used here, if it cannot."""
    if not torch.distributed.is_nccl_available():
        return "this torch has no NCCL"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return None


def refuse_one_gpu(mine: str, peers: str) -> None:
    """RuntimeError if both ranks would be on one GPU."""
    if mine == peers:
        raise RuntimeError(
            f"both workers are on GPU {mine}, where NCCL makes no group of two: transport "
            "cuda_ipc is the way"
        )
