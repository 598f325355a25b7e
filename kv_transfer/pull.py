"""What one owner sends of a transfer: the protocol's decisions carried out on a session.

Runs on the transfer thread. Ends only after the transport's fence, however it ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Never

from kv_transfer.handoff import Grant, PeerInfo, TransferKey, Verdict
from kv_transfer.landing import Landing
from kv_transfer.protocol import (
    Action,
    Answered,
    Begin,
    BlockLanded,
    Confirm,
    Fail,
    Fenced,
    Fetch,
    Granted,
    Opened,
    ReceiverProtocol,
    TransferState,
)
from kv_transfer.transfer_thread import run_beside
from kv_transfer.transport import (
    Clock,
    CorruptTransferError,
    FetchSession,
    InvalidTransferError,
    TransferDeadlineError,
    Transport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """What to pull, from whom, and how long it may take."""

    transport: Transport
    landing: Landing
    peer: PeerInfo
    key: TransferKey
    me: PeerInfo
    renew_every_s: float
    deadline_s: float


class Pull:
    """Carries out one order, once."""

    def __init__(self, order: PullOrder, protocol: ReceiverProtocol, clock: Clock) -> None:
        """`protocol` knows the placement; times are read from `clock`."""
        self._order = order
        self._protocol = protocol
        self._clock = clock
        self._session: FetchSession | None = None
        self._arrived: asyncio.Queue[tuple[Grant, float]] = asyncio.Queue()
        self._last_grant_at = 0.0
        self.confirmed_at = 0.0
        """On the clock; nothing before it is."""
        self.is_ending = False
        """The fence is being waited for: cancelling could only break it."""

    @property
    def protocol(self) -> ReceiverProtocol:
        """Where it stands."""
        return self._protocol

    @property
    def last_grant_at(self) -> float:
        """On the clock; of the grant that came last."""
        return self._last_grant_at

    @property
    def transport(self) -> str:
        """Name of the transport that it uses."""
        return self._order.transport.name

    @property
    def num_bytes(self) -> int:
        """Bytes that were moved: of whole blocks of the owner's, whatever part of them is ours."""
        return self._protocol.blocks_landed * self._order.landing.memory.bytes_per_block

    async def run(self) -> None:
        """Pull everything and have it confirmed; raises the `TransferError` tree.

        CONFIRMED is for this source alone: whoever has all of them publishes.
        """
        try:
            await self._pull_in_time()
        except BaseException:
            await self._drain()
            raise
        self.confirmed_at = self._clock()
        try:
            await self._close()
        except BaseException:
            self._protocol.apply(Fail())  # and no fence: nobody knows whether it has passed
            raise

    async def _pull_in_time(self) -> None:
        self._protocol.apply(Begin())
        deadline = asyncio.timeout(self._order.deadline_s)
        try:
            async with deadline:
                order = self._order
                session = await order.transport.connect(
                    order.landing.memory, order.peer, order.key, order.me
                )
                self._session = session
                self._protocol.apply(Opened())
                await run_beside(self._follow(session), self._renew(session), self._listen(session))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TransferDeadlineError(
                f"transfer {self._order.key.transfer_id} took over {self._order.deadline_s} s "
                f"while {self._protocol.state.value}"
            ) from error

    async def _follow(self, session: FetchSession) -> None:
        """Fetch each grant, while prefill computes what the next one will hold; then confirm."""
        action: Action | None = None
        while not isinstance(action, Confirm):
            grant, self._last_grant_at = await self._arrived.get()
            action = self._protocol.apply(Granted(grant))
            if isinstance(action, Fetch):
                action = await self._fetch(session, action)
        verdict = await session.confirm()
        self._protocol.apply(Answered(verdict))
        if verdict is not Verdict.VALID:
            raise InvalidTransferError(
                f"transfer {self._order.key.transfer_id}: blocks changed while they were read"
            )

    async def _fetch(self, session: FetchSession, fetch: Fetch) -> Action | None:
        landing = self._order.landing
        await landing.ready()
        action: Action | None = None
        for blocks, placement in landing.parts(fetch):
            async for block in session.fetch(blocks, placement):
                landing.place(block)
                action = self._protocol.apply(BlockLanded(block))
        return action

    async def _listen(self, session: FetchSession) -> None:
        """Take grants as they arrive: their time counts from then, not from their fetch."""
        async for grant in session.grants():
            self._arrived.put_nowait((grant, self._clock()))
            if grant.is_last:
                return
        raise CorruptTransferError("the grants ended without a last one")

    async def _renew(self, session: FetchSession) -> Never:
        while True:
            await asyncio.sleep(self._order.renew_every_s)
            await session.renew()

    async def _drain(self) -> None:
        if self._protocol.state is not TransferState.DRAINING:  # as INVALID has made it
            self._protocol.apply(Fail())
        self.is_ending = True
        if self._session is not None:
            await self._session.release()
        await self._close()
        self._protocol.apply(Fenced())

    async def _close(self) -> None:
        self.is_ending = True
        try:
            if self._session is not None:
                await self._session.close()
        except BaseException:
            self._order.landing.unfenced()
            raise
        self._order.landing.fenced()
