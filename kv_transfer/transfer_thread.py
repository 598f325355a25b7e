"""The thread that moves KV, apart from the worker's event loop and from the model step.

A lease must be renewed, and a fetch must go on, while a forward pass runs; and no transfer may hold
up the worker. So each side of a link has one such thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


MAX_TURN_S = 30.0
"""After which the loop counts as hung. Its longest honest turns map a pool or end a NIXL agent, and
take a second or two on a crowded host; a copy in a GPU has no bound of its own."""


class TransferThread:
    """A thread that runs one event loop until it is told to stop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Name the thread; `start` creates it. `is_hung` goes by the clock, in seconds."""
        self._name = name
        self._clock = clock
        self._asked_at: float | None = None
        """When `is_hung` asked the loop for a sign of life that has not come."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def is_running(self) -> bool:
        """Whether work can be posted."""
        return self._loop is not None

    @property
    def is_hung(self) -> bool:
        """Whether a question of an earlier look has had no answer for too long; from one thread.

        For who looks often: a look asks the next question, and waits for nothing.
        """
        if not self.is_running:
            return False
        asked_at, now = self._asked_at, self._clock()
        if asked_at is None:
            self._asked_at = now
            self.post(self._answer)
            return False
        return now - asked_at > MAX_TURN_S

    def _answer(self) -> None:
        self._asked_at = None

    async def start(self) -> None:
        """Start the thread; returns once its loop runs."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name} was started before")
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopped = stopped
        self._thread = threading.Thread(
            target=self._main, args=(started, stopped), name=self._name, daemon=True
        )
        self._thread.start()
        await asyncio.wrap_future(started)

    def post(self, callback: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        """Have the loop call something soon, in the order of the posts; from any thread."""
        if self._loop is None:
            raise RuntimeError(f"{self._name} does not run")
        self._loop.call_soon_threadsafe(callback, *arguments)

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread's loop and wait for it from another loop."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError(f"{self._name} does not run")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one last coroutine on the loop, then `stop`; safe to repeat.

        A thread that hangs is left behind: nothing that it is asked for would ever be done.
        """
        if self.is_hung:
            logger.error("%s hangs, and is left behind", self._name)
            return
        if self.is_running:
            await self.run(last())
        await self.stop()

    async def stop(self) -> None:
        """Cancel what still runs on the loop and end the thread; safe to repeat."""
        if self._thread is None or self._stop is None:
            return
        if self._loop is not None:
            self.post(self._stop.set)
            self._loop = None
        await asyncio.wrap_future(self._stopped)
        self._thread.join()

    def _main(
        self,
        started: concurrent.futures.Future[None],
        stopped: concurrent.futures.Future[None],
    ) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        finally:
            stopped.set_result(None)

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        started.set_result(None)
        await self._stop.wait()


async def run_beside(
    main: Coroutine[Any, Any, Result], *others: Coroutine[Any, Any, None]
) -> Result:
    """Result of `main`, or the first failure of any; on return all of them have ended.

    The others may end early; those that still run when `main` ends are cancelled.
    """
    main_task = asyncio.create_task(main)
    tasks: set[asyncio.Task[Any]] = {main_task, *map(asyncio.create_task, others)}
    waiting = tasks
    try:
        while not main_task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {main_task}:
                task.result()
        return main_task.result()
    finally:
        await _end_all(tasks)


async def _end_all(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel and wait; a cancellation that comes meanwhile is kept until all have ended."""
    for task in tasks:
        task.cancel()
    interruption: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            interruption = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: whoever waits for `main` gets the first failure
    if interruption is not None:
        raise interruption
