"""The decode workers as the `WorkerPool` of Front's backend, one channel to each.

Who is there is asked of Serve, at once after a loss and every second otherwise; who is gone shows
by its connection, which is sooner.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing

from deployments.channel.address import ChannelAddress
from deployments.channel.choice import Candidate, choose
from deployments.channel.client import WorkerChannel
from deployments.channel.stream import ChannelLostError, ChannelTimings, connect
from kv_transfer.authentication import Initiator, Purpose, Secret
from workers.messages import GenerateRequest, WorkerEvent

__all__ = ["ChannelPool", "FindWorkers"]

logger = logging.getLogger(__name__)

FindWorkers = Callable[[], Awaitable[Sequence[ChannelAddress]]]
"""The workers that are known to be there; may leave out some, must not raise."""


class ChannelPool:
    """Implements `WorkerPool`; between `start` and `close`, on one event loop."""

    def __init__(
        self,
        *,
        me: str,
        find: FindWorkers,
        secret: Secret,
        timings: ChannelTimings,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        """`me` is what this Front is called."""
        self._me = me
        self._find = find
        self._secret = secret
        self._timings = timings
        self._rng = rng
        self._clock = clock
        self._watching: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Of each worker that is connected, or being connected to."""
        self._channels: dict[str, WorkerChannel] = {}
        self._lost = asyncio.Event()
        self._changed = asyncio.Event()
        """Set whenever a request that waits for a worker might find one."""

    def start(self) -> None:
        """Begin to look for workers."""
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._on_watch_ended)

    @property
    def is_watching(self) -> bool:
        """Whether new workers are looked for; the pool is of no use any more where it ends."""
        return self._watching is not None and not self._watching.done()

    async def close(self) -> None:
        """Leave every worker; requests that are open lose theirs."""
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def is_ready(self) -> bool:
        """Whether a worker takes requests now; without prefill workers it computes prompts."""
        return self.is_watching and any(each.is_open for each in self._candidates())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[WorkerEvent, None]:
        """See `WorkerPool.generate`; waits for a worker where there is none."""
        channel = await self._choose(request.avoid)
        async with aclosing(channel.generate(request)) as events:
            async for event in events:
                yield event

    async def _choose(self, avoid: Collection[str]) -> WorkerChannel:
        while True:
            worker = choose(self._candidates(), avoid, self._rng)
            if worker is not None:
                return self._channels[worker]
            if not self.is_watching:
                raise RuntimeError("the pool is not looking for workers")
            self._changed.clear()
            await self._changed.wait()

    def _candidates(self) -> list[Candidate]:
        found = (channel.candidate for channel in self._channels.values())
        return [candidate for candidate in found if candidate is not None]

    def _on_watch_ended(self, watching: asyncio.Task[None]) -> None:
        """By `close`, or by a bug: who waits for a worker must not wait for ever."""
        self._changed.set()
        if not watching.cancelled() and (error := watching.exception()) is not None:
            logger.error("workers are not looked for any more", exc_info=error)

    async def _watch(self) -> None:
        """Connect to whoever is new."""
        while True:
            self._lost.clear()
            for address in await self._find():
                if address.worker not in self._tasks:
                    self._tasks[address.worker] = asyncio.create_task(self._keep(address))
            timings = self._timings
            pause_s = timings.find_s if self._channels else timings.find_first_s
            try:
                async with asyncio.timeout(pause_s):
                    await self._lost.wait()
            except TimeoutError:
                continue

    async def _keep(self, address: ChannelAddress) -> None:
        """The channel to one worker, for as long as there is one."""
        worker = address.worker
        initiator = Initiator(
            secret=self._secret, purpose=Purpose.TOKEN_CHANNEL, me=self._me, peer=worker
        )
        try:
            stream = await connect(address, initiator, self._timings)
            channel = WorkerChannel(
                stream,
                worker=worker,
                silence_s=self._timings.silence_s,
                clock=self._clock,
                on_load=self._changed.set,
            )
            self._channels[worker] = channel
            await channel.run()
        except ChannelLostError as error:
            logger.info("channel ended worker=%s reason=%s", worker, error)
        finally:
            del self._tasks[worker]
            if self._channels.pop(worker, None) is not None:
                self._lost.set()
