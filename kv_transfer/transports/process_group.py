"""A process group of two ranks, one on each end of a pair, and the thread that it is used from.

There is no default group and no environment: a group is a backend object over a store of our own.
Its calls block, so each group has one thread for them, apart from the loop of its owner; whatever
is under way there, `close` ends it and is the fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch._C._distributed_c10d import Store, Work

from kv_transfer.transport import MemoryKind, PeerLostError
from kv_transfer.transports.mirrored_store import MirroredStore
from kv_transfer.transports.pair_plan import MESSAGE_BYTES, WINDOW, Message, Span, messages_of

Result = TypeVar("Result")

OWNER_RANK, RECEIVER_RANK = 0, 1
_DATA_TAG = 0
_SOURCE_LINE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ?")
_MESSAGE_DEADLINE = timedelta(seconds=5)
"""Ends a wait that nothing else ends: Gloo does not wake who waits for the message that was half
way when its connection broke. A session gives up earlier, after `StreamTimings.silence_s`."""


_ABORT_S = 10.0
"""Gloo's abort takes milliseconds; NCCL's waits for the GPU, which has no bound of its own."""


class PointToPoint(Protocol):
    """What is used of a torch process group."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Work:
        """Post a send."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Work:
        """Post a receive."""


class GroupBackend(Protocol):
    """One of torch's backends, as pairs use it; called from the threads of groups."""

    name: str
    memory: MemoryKind
    """Of the pools that messages go straight to and from; small blocks are packed first."""

    def make(self, store: Store, rank: int) -> PointToPoint:
        """A group of two; returns once both ends have made it."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Memory of that kind."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Between a pool and the staging; both have as many bytes."""

    def finish(self, work: Work, timeout: timedelta) -> None:
        """Return once the message has gone, or has come whole."""

    def abort(self, group: PointToPoint, peer: int) -> None:
        """End everything under way with an error, in whatever thread it is waited for.

        On return no byte reaches or leaves the memory of any message of this group. Safe to repeat.
        """


class PairGroup:
    """One end of a group of two. Belongs to one loop; used for one turn at a time."""

    def __init__(self, backend: GroupBackend, rank: int) -> None:
        """Make a thread for it; `make` makes the group."""
        self._backend = backend
        self._rank = rank
        self._peer = 1 - rank
        self._group: PointToPoint | None = None
        self._store: MirroredStore | None = None
        self._staging: torch.Tensor | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"kv-pair-{backend.name}")
        self._closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self._lock = threading.Lock()
        self._is_fenced = False
        """Nothing is written any more, and what is made is for nobody."""

    async def make(self, store: MirroredStore) -> None:
        """Make the group, together with the other end; `PeerLostError` if that fails."""
        self._store = store
        await self._run(lambda: self._make(store))

    async def send(self, blocks: Sequence[torch.Tensor]) -> None:
        """Send blocks of one size; the other end receives as many of that size."""
        await self._run(lambda: self._send(blocks))

    async def receive(
        self, blocks: Sequence[torch.Tensor], arrived: Callable[[int, int], None]
    ) -> None:
        """Receive blocks; `arrived(messages, num_bytes)` is called on the loop, message by message.

        The counts are those since the start of this call.
        """
        loop = asyncio.get_running_loop()

        def tell(messages: int, num_bytes: int) -> None:
            loop.call_soon_threadsafe(arrived, messages, num_bytes)

        await self._run(lambda: self._receive(blocks, tell))

    async def close(self) -> None:
        """Abort, end the thread, let go of the group; safe to repeat, and the fence.

        RuntimeError if the group was not aborted, or not in time: then nothing may be reused.
        """
        if not self._is_closing:
            self._is_closing = True
            loop = asyncio.get_running_loop()
            threading.Thread(
                target=self._close, args=(loop,), name="kv-pair-close", daemon=True
            ).start()
        await asyncio.wait([self._closed], timeout=_ABORT_S)
        self._end(f"{_ABORT_S:g} s have passed")  # whoever waits for a call of this group goes on
        if (failure := self._closed.result()) is not None:
            raise RuntimeError(f"INV-FENCE: a process group was not aborted: {failure}")

    def _end(self, failure: str | None) -> None:
        """How the abort ended, by the first word of it."""
        if not self._closed.done():
            self._closed.set_result(failure)

    async def _run(self, call: Callable[[], None]) -> None:
        if self._is_closing:
            raise PeerLostError("the process group is closed")
        running = asyncio.wrap_future(self._executor.submit(_failure_of, call))
        running.add_done_callback(_seen)
        # Cancelled, it goes on until `close`; and after that its thread may still be waiting.
        await asyncio.wait([running, self._closed], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise PeerLostError("the process group was closed")
        failure = running.result()
        if failure is not None:
            raise PeerLostError(f"process group ({self._backend.name}): {failure}")

    # On the group's thread.

    def _make(self, store: MirroredStore) -> None:
        group = self._backend.make(store, self._rank)
        with self._lock:
            if not self._is_fenced:
                self._group = group
                return
        self._backend.abort(group, self._peer)

    def _send(self, blocks: Sequence[torch.Tensor]) -> None:
        group = self._made()
        under_way: deque[Work] = deque()
        for number, message in enumerate(_plan(blocks)):
            if len(under_way) == WINDOW:
                self._backend.finish(under_way.popleft(), _MESSAGE_DEADLINE)
            buffer = self._buffer(number, message, blocks)
            if not self._is_direct(message):
                self._pack(message, blocks, buffer)
            under_way.append(group.send([buffer], self._peer, _DATA_TAG))
        while under_way:
            self._backend.finish(under_way.popleft(), _MESSAGE_DEADLINE)

    def _receive(self, blocks: Sequence[torch.Tensor], arrived: Callable[[int, int], None]) -> None:
        group = self._made()
        messages = _plan(blocks)
        under_way: deque[tuple[Work, torch.Tensor]] = deque()
        posted, num_bytes = 0, 0
        for number, message in enumerate(messages):
            while posted < min(number + WINDOW, len(messages)):
                buffer = self._buffer(posted, messages[posted], blocks)
                work = group.recv([buffer], self._peer, _DATA_TAG)
                under_way.append((work, buffer))
                posted += 1
            work, buffer = under_way.popleft()
            self._backend.finish(work, _MESSAGE_DEADLINE)
            if not self._is_direct(message):
                with self._lock:  # a copy is the one thing that could land after the abort
                    if self._is_fenced:
                        raise RuntimeError("the group was closed")
                    self._unpack(message, buffer, blocks)
            num_bytes += buffer.nbytes
            arrived(number + 1, num_bytes)

    def _made(self) -> PointToPoint:
        if self._group is None:
            raise RuntimeError("the group was not made")
        return self._group

    def _is_direct(self, message: Message) -> bool:
        return len(message) == 1

    def _buffer(
        self, number: int, message: Message, blocks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Where a message is while it is under way: in its block, or in its slot of the staging."""
        if self._is_direct(message):
            return _bytes_of(blocks, message[0])
        if self._staging is None:  # once: the first touch of fresh memory costs more than a copy
            self._staging = self._backend.staging(WINDOW * MESSAGE_BYTES)
        start = number % WINDOW * MESSAGE_BYTES
        return self._staging[start : start + sum(span.stop - span.start for span in message)]

    def _pack(self, message: Message, blocks: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        for span, part in _parts(message, buffer):
            self._backend.copy(part, _bytes_of(blocks, span))

    def _unpack(
        self, message: Message, buffer: torch.Tensor, blocks: Sequence[torch.Tensor]
    ) -> None:
        for span, part in _parts(message, buffer):
            self._backend.copy(_bytes_of(blocks, span), part)

    # On a thread of its own, once.

    def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._store is not None:
            self._store.close()
        with self._lock:
            self._is_fenced = True
            group, self._group, self._staging = self._group, None, None
        failure: str | None = "not even its failure is known"
        try:
            failure = None if group is None else self._abort(group)
        finally:
            # Not waited for: a backend may be waiting for the peer's connection, or for a message
            # that was half way, and cannot be told to stop. Its own deadline ends it; unless the
            # abort failed it can write nothing.
            self._executor.shutdown(wait=False)
            with contextlib.suppress(RuntimeError):  # given up, and the loop has ended since
                loop.call_soon_threadsafe(self._end, failure)

    def _abort(self, group: PointToPoint) -> str | None:
        """What that failed with, if it did."""
        return _failure_of(lambda: self._backend.abort(group, self._peer))


def _plan(blocks: Sequence[torch.Tensor]) -> tuple[Message, ...]:
    return messages_of(len(blocks), blocks[0].nbytes) if blocks else ()


def _bytes_of(blocks: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    return blocks[span.block][span.start : span.stop]


def _parts(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Span, torch.Tensor]]:
    position = 0
    for span in message:
        end = position + span.stop - span.start
        yield span, buffer[position:end]
        position = end


def _failure_of(call: Callable[[], None]) -> str | None:
    """What a call fails with, in words alone: a traceback would keep the group and its messages."""
    try:
        call()
    except RuntimeError as error:
        return _short(error)
    return None


def _seen(ended: asyncio.Future[Result]) -> None:
    """Who waited may have been cancelled: then nobody wants to know what it failed with."""
    if not ended.cancelled():
        ended.exception()


def _short(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without where in its sources it was raised."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return _SOURCE_LINE.sub("", text)
