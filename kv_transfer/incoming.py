"""One transfer as the worker that pulls it holds it: between its event loop and the thread's."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TypeVar

from kv_transfer.gather import Gather
from kv_transfer.receiver_stats import Ledger
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import Landed, LeaseLostError

Result = TypeVar("Result")


class IncomingTransfer:
    """One transfer, as the worker holds it.

    Its destination blocks are the transfer's until `pull` has returned, or has failed and
    `wait_quiesced` has returned.
    """

    def __init__(self, gather: Gather, thread: TransferThread, ledger: Ledger) -> None:
        """Made by `KVReceiver.transfer`."""
        self._gather = gather
        self._thread = thread
        self._ledger = ledger
        self._has_begun = False
        self._is_released = False
        self._landed: concurrent.futures.Future[Landed] = _future()
        self._quiesced: concurrent.futures.Future[None] = _future()
        self._task: asyncio.Task[Landed] | None = None  # the transfer thread's

    async def pull(self) -> Landed:
        """Fetch, verify and confirm; returns only after VALID. To be called once.

        Raises the `TransferError` tree. Cancelling the caller aborts the transfer.
        """
        if self._has_begun:
            raise RuntimeError("a transfer can be pulled once")
        if self._is_released:
            raise LeaseLostError("the transfer was released before it was pulled")
        self._thread.post(self._begin)
        self._has_begun = True
        try:
            return await asyncio.wrap_future(self._landed)
        except asyncio.CancelledError:
            self.release()
            raise

    async def wait_quiesced(self) -> None:
        """Return once no byte can land any more; at once if nothing was ever asked for.

        Raises what broke the fence, if the transport could not keep it: the blocks are then lost
        to the pool.
        """
        if self._has_begun:
            await asyncio.wrap_future(self._quiesced)

    def release(self) -> None:
        """Give up a transfer that has not landed, forget one that has ended; safe to repeat."""
        self._is_released = True
        if self._thread.is_running:
            self._thread.post(self._give_up)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._gather.run())
        self._task.add_done_callback(self._ended)
        self._ledger.begin(self._task, self._give_up)

    def _give_up(self) -> None:
        if self._task is None:
            self._gather.withdraw()
        elif not self._task.done():
            self._gather.give_up()
            return
        self._gather.recycle()

    def _ended(self, task: asyncio.Task[Landed]) -> None:
        self._gather.withdraw()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._ledger.end(task, error, self._gather)
        if self._gather.is_quiesced:
            self._quiesced.set_result(None)
        else:
            self._quiesced.set_exception(error or RuntimeError("ended before its fence"))
        if error is None:
            self._landed.set_result(task.result())
        elif task.cancelled():
            self._landed.set_exception(LeaseLostError("released by the receiver"))
        else:
            self._landed.set_exception(error)


def _future() -> concurrent.futures.Future[Result]:
    """A future that a waiter's cancellation leaves alone."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future
