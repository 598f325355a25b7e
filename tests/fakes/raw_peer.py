"""The receiver's end of a stream transport, step by step as a test wants it."""

from __future__ import annotations

import asyncio

from kv_transfer.authentication import CHALLENGE_BYTES, PROOF_BYTES, Initiator, Purpose
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.transport import TransferError
from kv_transfer.transports import wire
from kv_transfer.transports.wire import HEADER_BYTES, FrameType, Header, Identity
from tests.fakes.block_memory import transfer_key
from tests.fakes.stream_kinds import SECRET, StreamKind


class RawPeer:
    """Says whatever a test wants to a server, frame by frame."""

    def __init__(self, kind: StreamKind, address: str, key: TransferKey | None = None) -> None:
        self.kind, self.address = kind, address
        self.identity = Identity.of(key or transfer_key())
        self.directions: bytes | None = None

    async def __aenter__(self) -> RawPeer:
        self.reader, self.writer = await self.kind.open(self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)

    async def challenge(self) -> bytes:
        """What the server says first."""
        async with asyncio.timeout(10):
            return await self.reader.readexactly(CHALLENGE_BYTES)

    async def prove(self, me: str = "d-1", peer: str = "p-1") -> None:
        """Prove to know the secret, as a process of the first name to one of the other."""
        initiator = Initiator(secret=SECRET, purpose=Purpose.KV_LINK, me=me, peer=peer)
        answer = initiator.answer(await self.challenge())
        self.writer.write(answer.response)
        async with asyncio.timeout(10):
            answer.check(await self.reader.readexactly(PROOF_BYTES))

    async def say(self, kind: FrameType, payload: bytes = b"") -> None:
        """Send a frame without KV."""
        self.writer.write(wire.control_frame(self.identity, kind, payload))
        await self.writer.drain()

    async def hear(self) -> tuple[Header, bytes]:
        """The next frame; not for DATA with a long payload."""
        async with asyncio.timeout(10):
            header = wire.parse_header(await self.reader.readexactly(HEADER_BYTES))
            return header, await self.reader.readexactly(header.length)

    async def hear_error(self) -> TransferError:
        """What the server refuses with."""
        while True:
            header, payload = await self.hear()
            if header.kind is FrameType.ERROR:
                return wire.unpack_error(payload)

    async def is_dropped(self) -> bool:
        """Whether the server ends the connection."""
        async with asyncio.timeout(10):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return True
            return True

    async def greet(self, key: TransferKey, me: PeerInfo) -> None:
        """As a receiver does, its proof included."""
        await self.prove(me.incarnation, key.prefill_incarnation)
        await self.say(FrameType.HELLO, wire.pack_hello(key, me))
        header, _ = await self.hear()
        assert header.kind is FrameType.WELCOME
        if self.kind.has_directions:
            header, self.directions = await self.hear()
            assert header.kind is FrameType.DIRECTIONS
