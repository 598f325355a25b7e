"""Waiting for what another thread or process does, where it sets no event of this loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kv_transfer.transfer_thread import TransferThread


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once the condition holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.001)


async def turned(*threads: TransferThread) -> None:
    """Return when the threads' loops, and this one, have turned so often that what was due is done.

    For what must not happen: it waits for no event, and for no time.
    """
    for _ in range(20):
        for thread in threads:
            await thread.run(asyncio.sleep(0))
