"""What every stream connection goes through before a byte of it is parsed: TLS, then both proofs.

The steps are those of `kv_transfer.authentication`, with the incarnations as names; deadlines are
the caller's.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kv_transfer.authentication import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Admitted,
    Initiator,
    Purpose,
    Responder,
    Secret,
)
from kv_transfer.handoff import PeerInfo
from kv_transfer.transport import CorruptTransferError, NotAuthenticatedError, PeerLostError
from kv_transfer.transports.frame_socket import FrameSocket
from kv_transfer.transports.tls import TlsContexts, TlsFrameSocket


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSecurity:
    """How the two ends of a connection know each other, and whether others may listen."""

    secret: Secret
    tls: TlsContexts | None = None
    """None is a plain connection."""

    def accepted(self, connection: socket.socket) -> FrameSocket:
        """Frames over a connection from a peer; OSError if it has ended."""
        if self.tls is None:
            return FrameSocket(connection)
        return TlsFrameSocket.accepted(connection, self.tls)

    def connected(self, connection: socket.socket) -> FrameSocket:
        """Frames over a connection to a peer; `PeerLostError` if it has ended, and is closed."""
        if self.tls is None:
            return FrameSocket(connection)
        try:
            return TlsFrameSocket.connected(connection, self.tls)
        except OSError as error:
            connection.close()
            raise PeerLostError(f"connection lost: {error}") from error

    async def admit(self, frames: FrameSocket, me: PeerInfo) -> Admitted:
        """The server's side; raises `NotAuthenticatedError` or `PeerLostError`."""
        responder = Responder(
            secret=self.secret,
            purpose=Purpose.KV_LINK,
            me=me.incarnation,
            channel=await frames.handshake(),
        )
        await frames.send([responder.challenge])
        admitted = responder.admit(await _receive(frames, RESPONSE_BYTES))
        await frames.send([admitted.proof])
        return admitted

    async def introduce(self, frames: FrameSocket, me: PeerInfo, peer: PeerInfo) -> None:
        """The receiver's side; raises `NotAuthenticatedError` or `PeerLostError`."""
        try:
            await self._introduce(frames, me, peer)
        except NotAuthenticatedError as error:
            raise NotAuthenticatedError(f"{peer.worker_id}: {error}") from error

    async def _introduce(self, frames: FrameSocket, me: PeerInfo, peer: PeerInfo) -> None:
        initiator = Initiator(
            secret=self.secret,
            purpose=Purpose.KV_LINK,
            me=me.incarnation,
            peer=peer.incarnation,
            channel=await frames.handshake(),
        )
        try:
            challenge = await _receive(frames, CHALLENGE_BYTES)
        except CorruptTransferError as error:  # TLS: the other end did not like our certificate
            raise NotAuthenticatedError(str(error)) from error
        answer = initiator.answer(challenge)
        try:
            await frames.send([answer.response])
            proof = await _receive(frames, PROOF_BYTES)
        except PeerLostError as error:  # who is refused is told nothing
            raise NotAuthenticatedError(
                "it ended the connection when it had our proof: the two have different secrets"
            ) from error
        answer.check(proof)


async def _receive(frames: FrameSocket, size: int) -> bytes:
    message = bytearray(size)
    await frames.receive_into(memoryview(message))
    return bytes(message)
