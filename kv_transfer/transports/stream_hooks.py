"""What a transport that talks in frames over a stream socket does in its own way, at both ends.

At the owner's an outlet, and a delivery for each connection; at the receiver's a source for each
session, which is handed an arrival for each block. What most of them do is written here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import GrantedBlock, TransferKey
from kv_transfer.transport import BlockMemory, CorruptTransferError, TransferError
from kv_transfer.transports import wire
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.wire import FrameType, Identity

Say = Callable[[FrameType, bytes], None]
"""Queues a frame for the receiver of a connection; on its loop."""


class Delivery(Protocol):
    """What a transport does for one connection beside its frames; for most, what is here: nothing.

    One for each connection, from its greeting to its end.
    """

    def take(self, kind: FrameType, payload: bytes) -> None:
        """A frame that only this transport has; raises `CorruptTransferError` if it has not."""
        raise CorruptTransferError(f"a receiver sent {kind.name}")

    def request(self, blocks: Sequence[GrantedBlock]) -> None:
        """Allowed blocks were asked for; raises `CorruptTransferError` if it is not the time."""
        return

    async def run(self) -> None:
        """Deliver what is requested, until cancelled; may end early if there is nothing to do."""
        return

    async def settle(self) -> None:
        """Return when all that was requested has gone: the receiver says that it has come."""
        return


class PlainDelivery(Delivery):
    """Frames are all there is."""


class BlockOutlet(Protocol):
    """What one transport's server does in its own way: where it listens, how it shows a block."""

    name: str
    """The transport's."""
    work_bytes: int
    """What giving a block takes, in bytes that are copied meanwhile; for most of them its size."""
    descriptor: int | None = None
    """Goes to every receiver with the welcome, where there is one."""

    async def start(self) -> None:
        """Get ready; nobody is served before."""
        return

    def listen(self) -> tuple[socket.socket, str]:
        """A socket that listens, and its address for `PeerInfo.endpoints`."""

    def frame(self, identity: Identity, block: GrantedBlock) -> Sequence[bytes | memoryview]:
        """The frame that gives a block to its reader."""

    def refusal(self, accepted: socket.socket) -> str | None:
        """Why this connection is not to be served, if it is not; most may prove themselves."""
        return None

    def delivery(self, key: TransferKey, say: Say) -> Delivery:
        """For a connection that has been greeted for this transfer.

        What is said at once follows the welcome, before any grant.
        """
        return PlainDelivery()

    async def close(self) -> None:
        """Every connection has ended, and no other will come; safe to repeat."""
        return


class Arrival(Protocol):
    """A block on its way into its place."""

    @property
    def block(self) -> GrantedBlock:
        """Which one, as its owner has just announced it."""

    @property
    def place(self) -> BlockId:
        """The block of our own that its bytes go into."""

    def landed(self) -> None:
        """All of them are there: verify them. Raises `CorruptTransferError`."""

    def failed(self, error: TransferError) -> None:
        """They will not all come: the session ends by this."""


class SessionControl(Protocol):
    """What a source may do with the control channel of its session."""

    async def say(self, kind: FrameType, payload: bytes = b"") -> None:
        """Send a frame; raises what the session has failed with, if it has."""

    async def until_failure(self) -> None:
        """Raise what the session fails with, once it does."""


class BlockSource(Protocol):
    """How one transport's blocks come in; what most of them do is written here."""

    kind: FrameType
    """Of the frames that announce them."""
    memory: BlockMemory
    """What they are written to."""

    def payload_bytes(self) -> int:
        """What must follow the header of a block; for most of them nothing."""
        return 0

    def content(self, place: BlockId) -> memoryview:
        """What the digest of a block that is there is made of; for most of them its bytes."""
        return self.memory.block(place)

    def most_blocks(self) -> int:
        """Of one fetch."""
        return wire.MAX_BLOCKS_PER_FETCH

    async def prepare(
        self,
        control: SessionControl,
        blocks: Sequence[GrantedBlock],
        places: Sequence[BlockId],
    ) -> None:
        """These blocks are to be asked for next, in this order; returns when they may be."""
        return

    def take(self, kind: FrameType, payload: bytes) -> None:
        """A frame that only this transport has; raises `CorruptTransferError` if it has not."""
        raise CorruptTransferError(f"an owner sent {kind.name}")

    async def fill(self, frames: FrameSocket, arrival: Arrival) -> None:
        """Begin to write the block whose header was read last, or do all of it.

        No frame is read meanwhile. What was begun tells `arrival` how it ended, once.
        """

    def is_full(self) -> bool:
        """Whether `fill` waits for what was begun, and not for the peer's frames.

        That none comes then says nothing about the peer: what was begun has a deadline of its own.
        """
        return False

    async def close(self, failure: TransferError | None) -> None:
        """The session has ended, well or by `failure`, which may say that the peer is gone.

        Returns once nothing that was begun can write any more.
        """
        return
