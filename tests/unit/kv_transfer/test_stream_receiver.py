"""What the receiver of blocks believes of an owner, over every stream transport."""

import asyncio
import contextlib
import dataclasses
from contextlib import asynccontextmanager

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.transport import (
    CorruptTransferError,
)
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.link_security import LinkSecurity
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Identity
from tests.fakes.block_memory import peer_info, transfer_key
from tests.fakes.kv_link import PLACES, POISON, kv_link
from tests.fakes.raw_peer import RawPeer
from tests.fakes.stream_kinds import SECRET, SHM, TCP


class RogueOwner:
    """Welcomes a receiver, waits for its fetch if told to, and announces one block as it likes."""

    def __init__(self, kind, link, key, header, *, waits_for_fetch, copies=1):
        self.kind, self.link = kind, link
        self.identity = Identity.of(key)
        content = b"\x55" * 512 if kind.block_frame is FrameType.DATA else b""
        self.answers = (header + content) * copies
        self.waits_for_fetch = waits_for_fetch
        self.descriptor = link.source.region.descriptor if kind is SHM else None

    async def __aenter__(self):
        if self.kind.has_directions:  # the true ones, or no session would come about
            key = self.link.open("directions")
            async with RawPeer(self.kind, self.link.address, key) as peer:
                await peer.greet(key, self.link.me)
                self.directions = peer.directions
        self.listener, address = self.kind.listen()
        self.listener.setblocking(False)
        self.link.reach_at(self.kind.name, address)
        self.serving = asyncio.create_task(self.serve())

    async def __aexit__(self, *_):
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.listener.close()

    async def serve(self):
        accepted, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        frames = FrameSocket(accepted)
        try:
            await self.answer(frames)
        finally:
            frames.close()

    async def answer(self, frames):
        owner = peer_info("prefill-0", "p-1", bytes_per_block=512)
        await LinkSecurity(secret=SECRET).admit(frames, owner)
        header = bytearray(HEADER_BYTES)
        await frames.receive_into(memoryview(header))
        await frames.receive_into(memoryview(bytearray(wire.parse_header(header).length)))
        welcome = wire.control_frame(self.identity, FrameType.WELCOME, wire.pack_welcome(owner))
        await frames.send([welcome], descriptor=self.descriptor)
        if self.kind.has_directions:
            payload = self.directions
            await frames.send([wire.control_frame(self.identity, FrameType.DIRECTIONS, payload)])
        if self.waits_for_fetch:
            await frames.receive_into(memoryview(header))
        await frames.send([self.answers])
        await frames.receive_into(memoryview(bytearray(1 << 20)))


@asynccontextmanager
async def open_session(kind, link, key):
    """A session to whoever is at the link's address now."""
    transport = kind.transport()
    session = await transport.connect(link.into, link.peer, key, link.me)
    try:
        yield session
    finally:
        await session.close()
        await transport.close()


def is_untouched(memory):
    return all(set(memory.block(BlockId(i))) == {POISON} for i in range(memory.num_blocks))


def header_of(kind, key, block, content=b"\x55" * 512):
    return wire.block_header(Identity.of(key), kind.block_frame, block, memoryview(content))


async def test_a_block_that_was_not_asked_for_touches_no_memory(kind):
    key = transfer_key()
    async with kv_link(kind.transport()) as link:
        header = header_of(kind, key, link.blocks()[0])
        async with (
            RogueOwner(kind, link, key, header, waits_for_fetch=False),
            open_session(kind, link, key) as session,
        ):
            with pytest.raises(CorruptTransferError, match="not asked for"):
                async for _ in session.grants():
                    pass
        assert is_untouched(link.destination)


@pytest.mark.parametrize("change", [{"generation": 7}, {"valid_tokens": 3}])
async def test_a_block_with_another_label_touches_no_memory(framed, change):
    key = transfer_key()
    async with kv_link(framed.transport()) as link:
        block = link.blocks()[0]
        header = header_of(framed, key, dataclasses.replace(block, **change))
        async with (
            RogueOwner(framed, link, key, header, waits_for_fetch=True),
            open_session(framed, link, key) as session,
        ):
            with pytest.raises(CorruptTransferError, match="generation, tokens, bytes"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
        assert is_untouched(link.destination)


@pytest.mark.parametrize("length", [256, 1024])
async def test_a_block_with_another_length_touches_no_memory(length):
    key = transfer_key()
    async with kv_link(TCP.transport()) as link:
        block = link.blocks()[0]
        header = header_of(TCP, key, block, b"\x55" * length)
        async with (
            RogueOwner(TCP, link, key, header, waits_for_fetch=True),
            open_session(TCP, link, key) as session,
        ):
            with pytest.raises(CorruptTransferError, match="generation, tokens, bytes"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
        assert is_untouched(link.destination)


async def test_a_block_of_another_kind_of_stream_is_refused(framed):
    other = TCP if framed.block_frame is FrameType.LOCATED else SHM
    key = transfer_key()
    async with kv_link(framed.transport()) as link:
        block = link.blocks()[0]
        async with (
            RogueOwner(framed, link, key, header_of(other, key, block), waits_for_fetch=True),
            open_session(framed, link, key) as session,
        ):
            with pytest.raises(CorruptTransferError, match="none was asked for"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
        assert is_untouched(link.destination)


async def test_a_block_that_comes_again_is_not_written_again(framed):
    key = transfer_key()
    async with kv_link(framed.transport()) as link:
        block = link.blocks()[0]
        sent = framed.block_frame is FrameType.DATA
        content = b"\x55" * 512 if sent else bytes(link.source.block(block.block_id))
        header = header_of(framed, key, block, content)
        async with (
            RogueOwner(framed, link, key, header, waits_for_fetch=True, copies=2),
            open_session(framed, link, key) as session,
        ):
            fetching = session.fetch([block], {block.logical: PLACES[0]})
            with contextlib.suppress(CorruptTransferError):  # before it has landed, or after
                assert [block async for block in fetching] == [block]
            with pytest.raises(CorruptTransferError, match="not asked for"):
                await anext(aiter(session.grants()))


async def test_a_block_that_differs_from_its_digest_does_not_land(framed):
    """Damaged on the way, or, in shared memory, overwritten since its owner announced it."""
    key = transfer_key()
    async with kv_link(framed.transport()) as link:
        block = link.blocks()[0]
        header = header_of(framed, key, block, b"\x54" * 512)
        async with (
            RogueOwner(framed, link, key, header, waits_for_fetch=True),
            open_session(framed, link, key) as session,
        ):
            with pytest.raises(CorruptTransferError, match="digest"):
                async for _ in session.fetch([block], {block.logical: PLACES[0]}):
                    pass
