"""The prefill worker's end of the torch transport: gives turns on the pairs' groups."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from kv_transfer.handoff import GrantedBlock, TransferKey
from kv_transfer.transport import BlockMemory, CorruptTransferError
from kv_transfer.transports import wire
from kv_transfer.transports.device import block_content, block_tensor, block_work
from kv_transfer.transports.mirrored_store import MirroredStore
from kv_transfer.transports.pair_messages import Entry, Ready, Turn
from kv_transfer.transports.pair_table import PairLimits, PairTable, Seat
from kv_transfer.transports.process_group import OWNER_RANK, GroupBackend, PairGroup
from kv_transfer.transports.stream_hooks import BlockOutlet, Delivery, Say
from kv_transfer.transports.tcp_socket import listen
from kv_transfer.transports.wire import FrameType, Identity

_MAX_STORE_BYTES = 64 * 1024  # of what a receiver writes into the store of one group


class GroupOutlet(BlockOutlet):
    """Blocks that go over the pair's group; a frame says that one goes, and its digest."""

    name = "torch"

    def __init__(
        self,
        memory: BlockMemory,
        *,
        host: str,
        port: int,
        limits: PairLimits,
        backend: GroupBackend,
    ) -> None:
        """For the blocks of `memory`; groups are made by `backend`, within `limits`."""
        self.work_bytes = block_work(memory)
        self._memory = memory
        self._host = host
        self._port = port
        self._limits = limits
        self._backend = backend
        self._pairs: PairTable[PairGroup] = PairTable(limits)

    def listen(self) -> tuple[socket.socket, str]:
        """For control; a group's sockets tell the peer their addresses by its store."""
        return listen(self._host, self._port)

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        """The block's header alone."""
        content = block_content(self._memory, block.block_id)
        return (wire.block_header(identity, FrameType.LOCATED, block, content),)

    def delivery(self, key: TransferKey, say: Say) -> Delivery:
        """Turns for one transfer's connection."""
        return _Turns(
            key.decode_incarnation, say, self._pairs, self._memory, self._backend, self._limits
        )

    async def close(self) -> None:
        """Close every group."""
        await self._pairs.close()


class _Turns(Delivery):
    """One receiver's turns, one after the other: asked for, fetched by, delivered."""

    def __init__(
        self,
        peer: str,
        say: Say,
        pairs: PairTable[PairGroup],
        memory: BlockMemory,
        backend: GroupBackend,
        limits: PairLimits,
    ) -> None:
        self._peer = peer
        self._say = say
        self._pairs = pairs
        self._memory = memory
        self._backend = backend
        self._limits = limits
        self._asked: asyncio.Queue[Turn] = asyncio.Queue()
        self._fetched: asyncio.Queue[Sequence[GrantedBlock]] = asyncio.Queue()
        self._is_open = False
        """A turn is promised, and no fetch has used it."""
        self._seat: Seat[PairGroup] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._store: MirroredStore | None = None
        self._store_epoch = 0
        self._store_bytes = 0

    def take(self, kind: FrameType, payload: bytes) -> None:
        """A receiver asks for a turn, or writes into the store of a new group."""
        match kind:
            case FrameType.TURN:
                self._take_turn(Turn.unpack(payload))
            case FrameType.RENDEZVOUS:
                self._take_entry(Entry.unpack(payload))
            case _:
                super().take(kind, payload)

    def request(self, blocks: Sequence[GrantedBlock]) -> None:
        """What the turn is used for."""
        if not self._is_open:
            raise CorruptTransferError("a fetch without a turn")
        if blocks:
            self._is_open = False
            self._fetched.put_nowait(blocks)

    async def run(self) -> None:
        """Serve turns until the connection ends; one that is cut short ends its group."""
        try:
            while True:
                await self._serve(await self._asked.get())
        finally:
            if self._seat is not None:
                await self._pairs.discard(self._seat)

    async def settle(self) -> None:
        """Return when no turn is under way."""
        await self._idle.wait()

    def _take_turn(self, turn: Turn) -> None:
        if self._is_open or not self._asked.empty():
            raise CorruptTransferError("a turn within a turn")
        if turn.is_new:
            self._store_epoch, self._store_bytes = turn.epoch, 0
            self._store = self._new_store(turn.epoch)
        self._asked.put_nowait(turn)

    def _take_entry(self, entry: Entry) -> None:
        self._store_bytes += len(entry.key) + len(entry.value)
        if self._store is None or entry.epoch != self._store_epoch:
            raise CorruptTransferError(f"no group of epoch {entry.epoch} is being made")
        if self._store_bytes > _MAX_STORE_BYTES:
            raise CorruptTransferError(f"over {_MAX_STORE_BYTES} bytes for the store of a group")
        self._store.put(entry.key, entry.value)

    def _new_store(self, epoch: int) -> MirroredStore:
        loop = asyncio.get_running_loop()

        def publish(key: str, value: bytes) -> None:
            payload = Entry(epoch=epoch, key=key, value=value).pack()
            loop.call_soon_threadsafe(self._say, FrameType.RENDEZVOUS, payload)

        return MirroredStore(publish, self._limits.pair_s)

    async def _serve(self, turn: Turn) -> None:
        self._idle.clear()
        seat = self._seat = await self._pairs.take(self._peer)
        if turn.is_new and turn.epoch <= seat.epoch:  # of a session that has ended meanwhile
            self._end(seat)
            raise CorruptTransferError(f"epoch {turn.epoch} of a pair comes after {seat.epoch}")
        if turn.is_new:
            await self._pairs.drop_group(seat)
        elif seat.group is None or seat.epoch != turn.epoch:
            self._answer(turn, is_paired=False)
            return self._end(seat)
        group = seat.group or PairGroup(self._backend, OWNER_RANK)
        seat.group, seat.epoch = group, turn.epoch
        self._is_open = True
        self._answer(turn, is_paired=True)
        if turn.is_new:
            assert self._store is not None, "a new turn came with a store"
            await group.make(self._store)
        blocks = await self._fetched.get()
        await group.send([block_tensor(self._memory, block.block_id) for block in blocks])
        return self._end(seat)

    def _answer(self, turn: Turn, *, is_paired: bool) -> None:
        self._say(FrameType.READY, Ready(epoch=turn.epoch, is_paired=is_paired).pack())

    def _end(self, seat: Seat[PairGroup]) -> None:
        self._seat = None
        self._pairs.leave(seat)
        self._idle.set()
