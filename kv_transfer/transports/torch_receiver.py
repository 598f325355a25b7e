"""The decode worker's end of the torch transport: takes turns on the pair's group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import GrantedBlock, PeerInfo
from kv_transfer.transfer_thread import run_beside
from kv_transfer.transport import BlockMemory, CorruptTransferError, PeerLostError, TransferError
from kv_transfer.transports.device import block_content, block_tensor, block_work
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.mirrored_store import MirroredStore
from kv_transfer.transports.pair_messages import Entry, Ready, Turn
from kv_transfer.transports.pair_plan import blocks_per_turn, messages_of
from kv_transfer.transports.pair_table import PairLimits, PairTable, Seat
from kv_transfer.transports.process_group import RECEIVER_RANK, GroupBackend, PairGroup
from kv_transfer.transports.stream_hooks import Arrival, BlockSource, SessionControl
from kv_transfer.transports.wire import FrameType


class GroupSource(BlockSource):
    """Blocks of one transfer that come over the pair's group, turn by turn."""

    kind = FrameType.LOCATED

    def __init__(
        self,
        pairs: PairTable[PairGroup],
        peer: PeerInfo,
        memory: BlockMemory,
        *,
        backend: GroupBackend,
        limits: PairLimits,
        frames: FrameSocket,
    ) -> None:
        """Seats are taken in `pairs`; what comes counts as a sign of life on `frames`."""
        self._pairs = pairs
        self._peer = peer
        self.memory = memory
        self._backend = backend
        self._limits = limits
        self._frames = frames
        self._seat: Seat[PairGroup] | None = None
        self._receives: _Receives | None = None
        self._answers: asyncio.Queue[Ready] = asyncio.Queue()
        self._store: tuple[int, MirroredStore] | None = None
        """Of the group that is being made, by epoch."""

    def content(self, place: BlockId) -> memoryview:
        """Of a pool in any memory."""
        return block_content(self.memory, place)

    def most_blocks(self) -> int:
        """Of one turn."""
        return blocks_per_turn(self.memory.bytes_per_block)

    async def prepare(
        self,
        control: SessionControl,
        blocks: Sequence[GrantedBlock],
        places: Sequence[BlockId],
    ) -> None:
        """Get the turn and post the receives, so that nothing that is fetched comes too early."""
        group = await run_beside(self._begin(control), control.until_failure())
        destinations = [block_tensor(self.memory, place) for place in places]
        self._receives = _Receives(group, blocks, destinations, self._frames)

    def take(self, kind: FrameType, payload: bytes) -> None:
        """The owner's answers, and its part of the store."""
        match kind:
            case FrameType.READY:
                self._answers.put_nowait(Ready.unpack(payload))
            case FrameType.RENDEZVOUS:
                entry = Entry.unpack(payload)
                if self._store is None or self._store[0] != entry.epoch:
                    raise CorruptTransferError(f"no group of epoch {entry.epoch} is being made")
                self._store[1].put(entry.key, entry.value)
            case _:
                super().take(kind, payload)

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        """Wait until the block has come; the turn ends with its last one."""
        logical = arrival.block.logical
        if self._receives is None:
            raise CorruptTransferError(f"logical block {logical} came outside a turn")
        await self._receives.wait_for(logical)
        await frames.pace(block_work(self.memory))
        if self._receives.is_complete:  # before who waits is told: a session that has all is closed
            await self._end_turn()
        arrival.landed()

    async def close(self, failure: TransferError | None) -> None:
        """Fence: an unfinished turn ends with its group, as an idle group does of a lost peer."""
        seat, self._seat = self._seat, None
        try:
            if seat is not None:
                await self._pairs.discard(seat)
            elif isinstance(failure, PeerLostError):
                await self._pairs.forget(self._peer.incarnation)
        finally:
            if self._receives is not None:
                await self._receives.end()

    async def _end_turn(self) -> None:
        receives, seat = self._receives, self._seat
        assert receives is not None, "a turn ends once"
        assert seat is not None, "a turn has a seat"
        await receives.end()
        self._receives = self._seat = None
        self._pairs.leave(seat)

    async def _begin(self, control: SessionControl) -> PairGroup:
        seat = self._seat = await self._pairs.take(self._peer.incarnation)
        try:
            async with asyncio.timeout(self._limits.pair_s):
                return await self._group(control, seat)
        except TimeoutError as error:
            raise PeerLostError(
                f"{self._peer.worker_id} gave no turn in {self._limits.pair_s} s"
            ) from error

    async def _group(self, control: SessionControl, seat: Seat[PairGroup]) -> PairGroup:
        """The seat's group, or a new one where there is none or the owner has given it up."""
        if seat.group is not None:
            if await self._ask(control, Turn(epoch=seat.epoch, is_new=False)):
                return seat.group
            await self._pairs.drop_group(seat)
        seat.epoch = self._pairs.next_epoch()
        return await self._make(control, seat)

    async def _make(self, control: SessionControl, seat: Seat[PairGroup]) -> PairGroup:
        loop = asyncio.get_running_loop()
        written: asyncio.Queue[Entry] = asyncio.Queue()

        def publish(key: str, value: bytes) -> None:
            entry = Entry(epoch=seat.epoch, key=key, value=value)
            loop.call_soon_threadsafe(written.put_nowait, entry)

        async def forward() -> None:
            while True:
                await control.say(FrameType.RENDEZVOUS, (await written.get()).pack())

        store = MirroredStore(publish, self._limits.pair_s)
        self._store = (seat.epoch, store)  # before the owner can answer
        if not await self._ask(control, Turn(epoch=seat.epoch, is_new=True)):
            raise PeerLostError(f"{self._peer.worker_id} makes no group")
        group = seat.group = PairGroup(self._backend, RECEIVER_RANK)
        await run_beside(group.make(store), forward())
        self._store = None
        return group

    async def _ask(self, control: SessionControl, turn: Turn) -> bool:
        await control.say(FrameType.TURN, turn.pack())
        answer = await self._answers.get()
        if answer.epoch != turn.epoch:
            raise CorruptTransferError(f"asked for epoch {turn.epoch}, {answer.epoch} is answered")
        return answer.is_paired


class _Receives:
    """The receives of one turn: begins with them posted, ends when all have come or failed."""

    def __init__(
        self,
        group: PairGroup,
        blocks: Sequence[GrantedBlock],
        destinations: Sequence[torch.Tensor],
        frames: FrameSocket,
    ) -> None:
        self._frames = frames
        self._messages = 0
        self._num_bytes = 0
        self._changed = asyncio.Event()
        needed = [0] * len(blocks)
        for number, message in enumerate(messages_of(len(blocks), destinations[0].nbytes)):
            for span in message:
                needed[span.block] = number + 1
        self._needed: dict[LogicalBlock, int] = {
            block.logical: messages for block, messages in zip(blocks, needed, strict=True)
        }
        self._receiving = asyncio.create_task(group.receive(destinations, self._arrived))
        self._receiving.add_done_callback(lambda _: self._changed.set())

    @property
    def is_complete(self) -> bool:
        """Whether every block of the turn was waited for, and has come."""
        return not self._needed

    async def wait_for(self, block: LogicalBlock) -> None:
        """Return once all of a block is in its place; raises what the group failed with."""
        needed = self._needed.pop(block, None)
        if needed is None:
            raise CorruptTransferError(f"logical block {block} is not in this turn")
        while self._messages < needed:
            if self._receiving.done():
                self._receiving.result()
                # It tells of the last message before it ends, by the same loop.
                assert self._messages >= needed, "a receive ended early and without an error"
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """Return when nothing is received any more; it has come, or its group is closed."""
        await asyncio.wait([self._receiving])
        if not self._receiving.cancelled():
            self._receiving.exception()  # seen: the session has failed with it or before it

    def _arrived(self, messages: int, num_bytes: int) -> None:
        self._frames.count_received(num_bytes - self._num_bytes)
        self._messages, self._num_bytes = messages, num_bytes
        self._changed.set()
