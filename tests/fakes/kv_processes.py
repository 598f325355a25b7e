"""Both ends of a transfer as processes of their own, or the reading one in the test's process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.receiver import KVReceiver
from kv_transfer.scratch import ScratchArenas
from kv_transfer.transports.stream_server import StreamTimings
from tests.fakes.block_memory import ByteMemory, peer_info
from tests.fakes.kv_owner import Owner
from tests.fakes.kv_reader import Reader
from tests.fakes.line_process import LineProcess
from tests.fakes.stream_kinds import StreamKind

NUM_BLOCKS = 64
SEED = 1
MARK = 0x77
PATIENT = StreamTimings(connect_s=3.0, silence_s=20.0, keep_alive_s=0.1)
"""Longer than anything right takes on any host: what ends earlier was ended by something else.

Gloo tries for five times `connect_s` to connect a group. That cannot be cut short: whoever is told
to end meanwhile takes as long.
"""
QUICK = StreamTimings(connect_s=3.0, silence_s=1.5)
"""For tests in which the other side falls silent, and that is to be noticed."""


class OwnerProcess(LineProcess):
    """The process that grants blocks: `kv_owner.py`."""

    def __init__(self, info: PeerInfo) -> None:
        super().__init__()
        self.info = info
        """With its endpoints once it is started."""
        self.ended: dict[str, list[str]] = {}
        """By transfer, why it ended."""

    def report(self, message: dict[str, Any]) -> None:
        self.ended.setdefault(message["ended"], []).append(message["reason"])

    async def offer(self, key: TransferKey, me: PeerInfo, grants: Sequence[list[int]]) -> None:
        """Open a transfer and grant lists of blocks; an empty list at the end keeps it open."""
        await self.ask("offer", key=asdict(key), decode=asdict(me))
        start = 0
        for number, block_ids in enumerate(grants):
            is_last = number == len(grants) - 1 and bool(block_ids)
            if block_ids:
                await self.grant(key, start, block_ids, is_last=is_last)
            start += len(block_ids)

    async def grant(
        self, key: TransferKey, start: int, block_ids: list[int], *, is_last: bool
    ) -> None:
        """Grant blocks of one token, logical block `start` first."""
        token_id = 7 if is_last else None
        await self.ask(
            "grant", key=asdict(key), start=start, block_ids=block_ids, token_id=token_id
        )


class ReaderProcess(LineProcess):
    """The process that pulls: `kv_reader.py`."""

    def __init__(self, info: PeerInfo) -> None:
        super().__init__()
        self.info = info
        self.outcomes: dict[str, str] = {}
        """By transfer, how its pull ended: `landed`, or the error's type."""

    def report(self, message: dict[str, Any]) -> None:
        self.outcomes[message["pulled"]] = message["outcome"]

    async def pull(self, owner: PeerInfo, key: TransferKey, places: list[int]) -> None:
        """Begin to pull."""
        await self.ask("pull", peer=asdict(owner), key=asdict(key), places=places)

    async def has_begun(self, place: int) -> None:
        """Return once something has landed there."""
        async with asyncio.timeout(20):
            while not (await self.ask("begun", place=place))["begun"]:
                pass


class Decode:
    """The receiving worker in the test's process."""

    def __init__(
        self,
        kind: StreamKind,
        bytes_per_block: int,
        *,
        num_blocks: int = NUM_BLOCKS,
        block_size: int = 1,
        scratch: ScratchArenas | None = None,
        lease_s: float = 5.0,
        timings: StreamTimings = PATIENT,
    ) -> None:
        own_bytes = block_size * bytes_per_block
        self.memory = ByteMemory(num_blocks, own_bytes)
        self.expected = ByteMemory(NUM_BLOCKS, bytes_per_block)
        self.expected.fill(SEED)
        self.me = replace(worker("d", own_bytes), block_size=block_size)
        self.receiver = KVReceiver(
            memory=self.memory,
            me=self.me,
            transports=[kind.transport(timings=timings)],
            scratch=scratch,
            lease_s=lease_s,
        )

    async def __aenter__(self) -> Decode:
        await self.receiver.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.receiver.close()

    def key(self, owner: OwnerProcess, transfer_id: str) -> TransferKey:
        """The key of a first attempt."""
        return key_of(owner.info, self.me, transfer_id)

    def incoming(
        self,
        owner: OwnerProcess,
        key: TransferKey,
        places: Iterable[int],
        deadline_s: float = 30.0,
    ) -> IncomingTransfer:
        """The receiver's handle on a transfer that fills these blocks."""
        block_ids = [BlockId(place) for place in places]
        num_tokens = len(block_ids) * self.me.block_size
        return self.receiver.transfer(owner.info, key, block_ids, num_tokens, deadline_s)

    def mark(self, places: Iterable[int]) -> None:
        """The destination blocks get another owner, who writes into them."""
        for place in places:
            self.memory.block(BlockId(place))[:] = bytes([MARK]) * self.memory.bytes_per_block

    def is_marked(self, places: Iterable[int]) -> bool:
        """Whether nobody else has written to them since."""
        mark = bytes([MARK]) * self.memory.bytes_per_block
        return all(self.memory.block(BlockId(place)) == mark for place in places)

    def holds(self, sources: Iterable[int], places: Iterable[int]) -> bool:
        """Whether the blocks are the owner's, byte for byte."""
        return all(
            self.expected.block(BlockId(source)) == self.memory.block(BlockId(place))
            for source, place in zip(sources, places, strict=True)
        )

    def has_begun(self, place: int) -> bool:
        """Whether anything has landed there."""
        return any(self.memory.block(BlockId(place))[:64])


def worker(name: str, bytes_per_block: int, incarnation: str | None = None) -> PeerInfo:
    """A worker with blocks of one token."""
    return peer_info(
        name,
        incarnation or f"{name}-1",
        bytes_per_block=bytes_per_block,
        block_size=1,
        max_model_len=NUM_BLOCKS,
        pool_tokens=NUM_BLOCKS,
    )


def key_of(owner: PeerInfo, reader: PeerInfo, transfer_id: str) -> TransferKey:
    """The key of a first attempt."""
    return TransferKey(
        transfer_id=transfer_id,
        epoch=0,
        prefill_incarnation=owner.incarnation,
        decode_incarnation=reader.incarnation,
    )


@asynccontextmanager
async def owner_process(
    kind: StreamKind,
    bytes_per_block: int,
    *,
    lease_s: float = 5.0,
    name: str = "p",
    incarnation: str | None = None,
    seed: int = SEED,
) -> AsyncIterator[OwnerProcess]:
    """A process that grants blocks, whose bytes are those of a seed."""
    owner = OwnerProcess(worker(name, bytes_per_block, incarnation))
    arguments = {
        "num_blocks": NUM_BLOCKS,
        "bytes_per_block": bytes_per_block,
        "seed": seed,
        "lease_s": lease_s,
        "transport": kind.label,
        "timings": asdict(PATIENT),  # no process that it talks to falls silent
        "me": asdict(owner.info),
    }
    peer = (await owner.start(Owner, arguments))["peer"]
    peer["endpoints"] = tuple(tuple(endpoint) for endpoint in peer["endpoints"])
    owner.info = PeerInfo(**peer)
    try:
        yield owner
    finally:
        await owner.close()


@asynccontextmanager
async def reader_process(
    kind: StreamKind, bytes_per_block: int, *, lease_s: float = 5.0
) -> AsyncIterator[ReaderProcess]:
    """A process that pulls blocks."""
    me = worker("d", bytes_per_block, "d-of-its-own")  # of no other process, as incarnations are
    arguments = {
        "num_blocks": NUM_BLOCKS,
        "bytes_per_block": bytes_per_block,
        "lease_s": lease_s,
        "transport": kind.label,
        "timings": asdict(PATIENT),  # no process that it talks to falls silent
        "me": asdict(me),
    }
    reader = ReaderProcess(me)
    await reader.start(Reader, arguments)
    try:
        yield reader
    finally:
        await reader.close()


async def shuffled_handoff(owner: OwnerProcess, decode: Decode, name: str, seed: int) -> None:
    """A whole hand-off between random blocks; checks every byte."""
    rng = random.Random(seed)
    sources, places = rng.sample(range(NUM_BLOCKS), 20), rng.sample(range(NUM_BLOCKS), 20)
    key = decode.key(owner, name)
    await owner.offer(key, decode.me, [sources[:1], sources[1:8], sources[8:]])
    landed = await decode.incoming(owner, key, places).pull()
    assert landed.first.token_id == 7
    assert decode.holds(sources, places)
