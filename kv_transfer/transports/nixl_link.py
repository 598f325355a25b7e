"""The agents with which a decode worker reads from prefill workers: one for each peer.

One agent a peer, although one could read from all: the only thing that stops a READ is the end of
its agent, and then that ends no transfer from another peer. A link is made at the first transfer
from a peer and kept for the next ones, because a start takes up to half a second. It is ended, and
the next transfer makes another, when one of its READs failed or did not end in time, when the
worker has come back as another process, and when it was unused for long.

All of it belongs to the transfer thread; only an agent's start runs beside it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo
from kv_transfer.polling import PollPace
from kv_transfer.transport import (
    BlockMemory,
    CorruptTransferError,
    LinkRefusedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.transports.nixl_agent import (
    Descriptor,
    NixlAgent,
    Read,
    ReadState,
    RemotePool,
    address_of,
)

logger = logging.getLogger(__name__)

_SLOW_POLL_S = 0.005
"""How late the end of a READ that takes for ever is noticed."""

OnReadEnd = Callable[[TransferError | None], None]


class NixlLink:
    """One agent, the peer that it reads from, and the READs that are under way."""

    def __init__(
        self, agent: NixlAgent, peer: PeerInfo, remote: RemotePool, stall_s: float
    ) -> None:
        """Own `agent`; READs of which none ends for `stall_s` count as failed.

        Raises `LinkRefusedError` if the peer's metadata is not an agent's.
        """
        self.peer = peer
        self.sessions = 0
        self.is_ended = False
        self.is_broken = False
        """Nothing new is to begin here; if a READ has failed, the agent's end is the fence."""
        self._agent = agent
        self._remote = remote
        self._stall_s = stall_s
        self._running: dict[Read, OnReadEnd] = {}
        self._stalled: set[Read] = set()
        self._pace = PollPace(idle_s=_SLOW_POLL_S, clock=time.monotonic)
        self._moved_at = 0.0
        self._poller: asyncio.Task[None] | None = None
        try:
            self._name = agent.add(remote.metadata)
        except ValueError as error:
            raise LinkRefusedError(f"{peer.worker_id}: {error}") from error

    def check(self, block_id: BlockId) -> None:
        """Refuse a block that is not in the peer's memory: `CorruptTransferError`."""
        if not 0 <= block_id < self._remote.num_blocks:
            raise CorruptTransferError(
                f"block {block_id} is outside {self.peer.worker_id}'s {self._remote.num_blocks}"
            )

    def read(self, pieces: Sequence[tuple[BlockId, memoryview]], on_end: OnReadEnd) -> Read | None:
        """Begin to read blocks into views; None if that cannot be, for the link has ended.

        `on_end` is called once, maybe at once: without an error, or with what became of the peer.
        """
        if self.is_broken:
            on_end(self._loss("the link has ended"))
            return None
        size = self._remote.bytes_per_block
        remote: list[Descriptor] = [
            (self._remote.address + block_id * size, size, 0) for block_id, _ in pieces
        ]
        local: list[Descriptor] = [(address_of(view), view.nbytes, 0) for _, view in pieces]
        self._pace.stir()
        if not self._running:
            self._moved_at = time.monotonic()
        read = self._agent.read(self._name, remote, local)
        self._running[read] = on_end
        if not self._take(read) and self._poller is None:
            self._poller = asyncio.create_task(self._poll())
            self._poller.add_done_callback(self._poller_ended)
        return read

    async def settle(self, reads: Sequence[Read], patience_s: float) -> None:
        """Return once no READ of these can write any more: all are done, or the agent has ended."""
        deadline = time.monotonic() + patience_s
        while not self.is_ended and any(read.state is not ReadState.DONE for read in reads):
            if self.is_broken or time.monotonic() > deadline:
                self.end("a read did not end")
            else:
                await asyncio.sleep(_SLOW_POLL_S)

    def end(self, why: str) -> None:
        """End the agent, and with it whatever is under way; safe to repeat."""
        if self.is_ended:
            return
        self.is_broken = True
        if self._poller is not None:
            self._poller.cancel()
        waiting = [on_end for read, on_end in self._running.items() if read not in self._stalled]
        self._running.clear()
        for on_end in waiting:
            on_end(self._loss(why))
        self._agent.close()
        self.is_ended = True
        logger.info("link ended peer=%s reads=%d why=%s", self.peer.worker_id, len(waiting), why)

    async def _poll(self) -> None:
        while self._running:
            for read in list(self._running):
                self._agent.progress(read)
                self._take(read)
            if time.monotonic() - self._moved_at > self._stall_s:
                self._give_up()
            await asyncio.sleep(self._pace.delay_s())
        self._poller = None  # at once: the next READ may come before this task counts as done

    def _take(self, read: Read) -> bool:
        """Tell who waits for a READ if it has ended."""
        if read.state is ReadState.RUNNING:
            return False
        self._pace.stir()
        self._moved_at = time.monotonic()
        on_end = self._running.pop(read)
        self.is_broken |= read.state is ReadState.FAILED
        if read in self._stalled:
            self._stalled.discard(read)
        else:
            on_end(None if read.state is ReadState.DONE else self._loss("a read failed"))
        return True

    def _give_up(self) -> None:
        """Nobody waits for what does not move; it goes on being watched, for the fence."""
        for read, on_end in list(self._running.items()):
            if read not in self._stalled:
                self._stalled.add(read)
                on_end(self._loss(f"no read has ended for {self._stall_s} s"))

    def _loss(self, why: str) -> PeerLostError:
        return PeerLostError(f"{self.peer.worker_id}: {why}")

    def _poller_ended(self, poller: asyncio.Task[None]) -> None:
        if not poller.cancelled() and (error := poller.exception()) is not None:
            logger.error("polling for reads failed", exc_info=error)
            self._poller = None
            self.is_broken = True
            self._give_up()


class NixlLinks:
    """The links of one transport, by peer."""

    def __init__(self, options: Mapping[str, str], *, stall_s: float, keep_s: float) -> None:
        """Agents start with UCX's `options`; a link that is unused for `keep_s` is ended."""
        self._options = options
        self._stall_s = stall_s
        self._keep_s = keep_s
        self._making: dict[tuple[str, int], asyncio.Task[NixlLink]] = {}
        self._expiry: dict[NixlLink, asyncio.TimerHandle] = {}

    async def enter(
        self, me: PeerInfo, peer: PeerInfo, remote: RemotePool, memory: BlockMemory
    ) -> NixlLink:
        """The link to a peer that has just welcomed this worker; `leave` must follow."""
        key = (peer.incarnation, address_of(memory.block(BlockId(0))))
        making = self._making.get(key)
        if making is not None and making.done() and not self._is_usable(making):
            making = None
        if making is None:
            making = asyncio.create_task(self._make(me, peer, remote, memory))
            making.add_done_callback(self._made)
            self._making[key] = making
        link = await asyncio.shield(making)  # others may wait for it too
        link.sessions += 1
        self._keep(link)
        self._end_older(link)
        return link

    def leave(self, link: NixlLink, *, peer_is_lost: bool) -> None:
        """A session has ended; the last one of a peer that it has lost leaves no agent for it."""
        link.sessions -= 1
        if link.sessions:
            return
        if peer_is_lost or link.is_broken or link not in self._kept():
            self._end(link, "not to be used again")
            return
        self._expire_later(link)

    async def close(self) -> None:
        """End all of them; no session may be open."""
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for link in self._kept():
            self._end(link, "the transport is closing")
        self._making.clear()

    async def _make(
        self, me: PeerInfo, peer: PeerInfo, remote: RemotePool, memory: BlockMemory
    ) -> NixlLink:
        # A name of its own: the peer may still know the last agent that this worker had for it.
        name = f"{me.worker_id}:{me.incarnation}:{secrets.token_hex(8)}"
        try:
            agent = await asyncio.to_thread(NixlAgent, name, memory, self._options)
        except OSError as error:
            raise LinkRefusedError(f"no agent for {peer.worker_id}: {error}") from error
        try:
            return NixlLink(agent, peer, remote, self._stall_s)
        except LinkRefusedError as error:
            refusal = str(error)
        agent.close()  # only now: the failure's traceback referred to it
        raise LinkRefusedError(refusal)

    def _made(self, making: asyncio.Task[NixlLink]) -> None:
        """Whoever waited may have been cancelled; who comes keeps the link from expiring."""
        if _has_result(making) and making.result().sessions == 0:
            self._expire_later(making.result())

    def _expire_later(self, link: NixlLink) -> None:
        loop = asyncio.get_running_loop()
        self._expiry[link] = loop.call_later(self._keep_s, self._end, link, "unused for long")

    def _kept(self) -> list[NixlLink]:
        return [task.result() for task in self._making.values() if _has_result(task)]

    def _is_usable(self, making: asyncio.Task[NixlLink]) -> bool:
        if not _has_result(making):
            return False
        return not making.result().is_broken

    def _end_older(self, link: NixlLink) -> None:
        """Forget links to the worker's earlier processes, and those that have ended."""
        for key, making in list(self._making.items()):
            if not making.done():
                continue
            if not self._is_usable(making) or self._is_older(making.result(), link):
                del self._making[key]
                if _has_result(making) and making.result().sessions == 0:
                    self._end(making.result(), "the worker came back as another process")

    def _is_older(self, other: NixlLink, link: NixlLink) -> bool:
        return (
            other.peer.worker_id == link.peer.worker_id
            and other.peer.incarnation != link.peer.incarnation
        )

    def _keep(self, link: NixlLink) -> None:
        if (expiry := self._expiry.pop(link, None)) is not None:
            expiry.cancel()

    def _end(self, link: NixlLink, why: str) -> None:
        self._keep(link)
        link.end(why)


def _has_result(task: asyncio.Task[NixlLink]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
