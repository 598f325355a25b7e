"""Everything that is pulled for one sequence: from one owner, or from each that has heads of ours.

Runs on the transfer thread. The sources are pulled beside each other; the first one that fails ends
all of them. Whatever happens, the end of the whole is the end of each: no source is left that could
still write when the blocks are somebody else's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from kv_transfer.joined import JoinedTransfer
from kv_transfer.protocol import TransferState
from kv_transfer.pull import Pull
from kv_transfer.transport import Clock, Landed

__all__ = ["Gather"]


class Gather:
    """Carries out the pulls of one sequence, once."""

    def __init__(
        self,
        pulls: Sequence[Pull],
        *,
        num_tokens: int,
        first_tokens: tuple[int, ...],
        clock: Clock,
    ) -> None:
        """The first one's owner says what comes after the prompt; ValueError if there is none.

        What lands is, in each group, what has KV from the token in `first_tokens` on.
        """
        self._pulls = tuple(pulls)
        self._num_tokens = num_tokens
        self._first_tokens = first_tokens
        self._clock = clock
        self._joined = JoinedTransfer([pull.protocol for pull in pulls])
        self._running: dict[asyncio.Task[None], Pull] = {}
        self._failed: list[tuple[Pull, BaseException]] = []  # in the order of their ends
        self._is_given_up = False
        self._started_at: float | None = None

    @property
    def blocks_landed(self) -> int:
        """Blocks that landed and were verified, of all sources."""
        return self._joined.blocks_landed

    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes of these, by transport."""
        moved: Counter[str] = Counter()
        for pull in self._pulls:
            moved[pull.transport] += pull.num_bytes
        return moved

    @property
    def spent_s(self) -> float:
        """Seconds since the first of them was asked for; 0 before."""
        return 0.0 if self._started_at is None else self._clock() - self._started_at

    @property
    def is_quiesced(self) -> bool:
        """Whether no byte lands any more."""
        return self._joined.is_quiesced

    async def run(self) -> Landed:
        """Pull from all sources and have all confirm; raises what the first of them failed with.

        Returns or raises only after the fence of every source. Not to be cancelled: `give_up`.
        """
        if self._is_given_up:
            raise asyncio.CancelledError
        started_at = self._started_at = self._clock()
        for pull in self._pulls:
            task = asyncio.create_task(pull.run())
            task.add_done_callback(self._ended)
            self._running[task] = pull
        await asyncio.wait(tuple(self._running))
        self._raise_failure()
        self._joined.publish()
        return self._landed(started_at)

    def give_up(self) -> None:
        """Cancel every pull that is not at its end anyway; safe to repeat.

        Each once only, and not into its fence: that ends by itself, and must not be cut short.
        """
        self._is_given_up = True
        for task, pull in self._running.items():
            if not pull.is_ending:
                pull.is_ending = True
                task.cancel()

    def withdraw(self) -> None:
        """It is over, or was never begun: without a publish, no source's part is of use."""
        if all(task.done() for task in self._running):
            self._joined.withdraw()

    def recycle(self) -> None:
        """The destination blocks of a failed transfer go back to the pool; safe to repeat."""
        self._joined.recycle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._failed.append((self._running[task], error))
            self.give_up()

    def _raise_failure(self) -> None:
        """A broken fence before all else: the blocks are lost to the pool by it."""
        for pull, error in self._failed:
            if pull.protocol.state is TransferState.DRAINING:
                raise error
        # The first is the cause; but one that was cancelled before it could tell is no cause.
        for _, error in self._failed:
            if not isinstance(error, asyncio.CancelledError):
                raise error
        if self._failed:
            raise asyncio.CancelledError

    def _landed(self, started_at: float) -> Landed:
        protocol = self._pulls[0].protocol
        assert protocol.first is not None, "INV-COVER: confirmed without a last grant"
        confirmed_at = max(pull.confirmed_at for pull in self._pulls)
        return Landed(
            first=protocol.first,
            prompt_logprobs=protocol.prompt_logprobs,
            num_tokens=self._num_tokens,
            first_tokens=self._first_tokens,
            num_blocks=self.blocks_landed,
            moved=self.moved,
            fetch_s=confirmed_at - started_at,
            wait_s=confirmed_at - max(pull.last_grant_at for pull in self._pulls),
        )
