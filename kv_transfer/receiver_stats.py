"""What a receiver counts: the transfers that run, and how those that are over have ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kv_transfer.durations import HANDOFF_BOUNDS_S, DurationCounts, Durations
from kv_transfer.selection import Choice
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    Landed,
    LeaseLostError,
    LinkRefusedError,
    NotAuthenticatedError,
    PeerLostError,
    TransferDeadlineError,
)

logger = logging.getLogger(__name__)

OUTCOMES: Mapping[type[BaseException], str] = MappingProxyType(
    {
        LinkRefusedError: "link_refused",
        NotAuthenticatedError: "not_authenticated",
        PeerLostError: "peer_lost",
        TransferDeadlineError: "deadline",
        LeaseLostError: "lease_lost",
        CorruptTransferError: "corrupt",
        InvalidTransferError: "invalid",
        asyncio.CancelledError: "cancelled",
    }
)
"""How a failed pull is counted; a landed one is `landed`, one whose fence did not pass is
`fence_broken`, any other failure `internal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """Counters of one receiver since its start."""

    active: int
    by_outcome: Mapping[str, int]
    """Ended pulls: `landed`, or what they failed by (`OUTCOMES`)."""
    blocks_published: int
    bytes_published: Mapping[str, int]
    """By transport; each that this worker has, has an entry."""
    links: Mapping[str, Choice]
    """The transport that was last chosen for each peer, by worker id, and why."""
    bytes_discarded: Mapping[str, int]
    """Landed in transfers that failed; by transport, as `bytes_published`."""
    seconds_lost: Mapping[str, float]
    """From the beginning of failed transfers to their end, by outcome."""
    digests_checked: int
    """Blocks that landed and were verified, those of failed transfers included."""
    fetch: DurationCounts
    """`Landed.fetch_s` of landed transfers."""
    wait: DurationCounts
    """`Landed.wait_s` of landed transfers."""


class Effort(Protocol):
    """What a transfer has cost, however it ended."""

    @property
    def blocks_landed(self) -> int: ...
    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes of these, by transport."""

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""

    @property
    def is_quiesced(self) -> bool:
        """Whether no byte lands any more."""


class Ledger:
    """The transfers that run, and the counts of those that have ended.

    Written by the transfer thread alone; a snapshot from another thread may be one transfer late.
    """

    def __init__(self, transports: Sequence[str]) -> None:
        self._running: dict[asyncio.Task[Landed], Callable[[], None]] = {}
        self._by_outcome: Counter[str] = Counter()
        self._blocks_published = 0
        self._bytes_published = dict.fromkeys(transports, 0)
        self._bytes_discarded = dict.fromkeys(transports, 0)
        self._seconds_lost: defaultdict[str, float] = defaultdict(float)
        self._digests_checked = 0
        self._fetch = Durations(HANDOFF_BOUNDS_S)
        self._wait = Durations(HANDOFF_BOUNDS_S)

    def begin(self, task: asyncio.Task[Landed], give_up: Callable[[], None]) -> None:
        self._running[task] = give_up

    def end(self, task: asyncio.Task[Landed], error: BaseException | None, effort: Effort) -> None:
        del self._running[task]
        self._digests_checked += effort.blocks_landed
        if error is not None:
            outcome = OUTCOMES.get(type(error), "internal")
            if not effort.is_quiesced:
                outcome = "fence_broken"
            self._by_outcome[outcome] += 1
            self._seconds_lost[outcome] += effort.spent_s
            _add(self._bytes_discarded, effort.moved)
            if outcome == "internal":
                logger.error("a transfer failed by our own fault", exc_info=error)
            return
        landed = task.result()
        self._by_outcome["landed"] += 1
        self._blocks_published += landed.num_blocks
        _add(self._bytes_published, landed.moved)
        self._fetch.observe(landed.fetch_s)
        self._wait.observe(landed.wait_s)

    async def end_all(self) -> None:
        for give_up in list(self._running.values()):
            give_up()
        if self._running:
            await asyncio.wait(self._running)

    def stats(self, links: Mapping[str, Choice]) -> ReceiverStats:
        return ReceiverStats(
            active=len(self._running),
            by_outcome=dict(self._by_outcome),
            blocks_published=self._blocks_published,
            bytes_published=dict(self._bytes_published),
            links=dict(links),
            bytes_discarded=dict(self._bytes_discarded),
            seconds_lost=dict(self._seconds_lost),
            digests_checked=self._digests_checked,
            fetch=self._fetch.counts(),
            wait=self._wait.counts(),
        )


def _add(total: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        total[name] += count
