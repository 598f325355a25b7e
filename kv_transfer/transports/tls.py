"""Connections inside TLS 1.3, both ends with a certificate of the deployment's own authority.

Names in certificates are not compared, since workers have none that lasts: the authority signs for
this deployment alone, and which worker it is that answers is what the proofs of
`kv_transfer.authentication` say, which cover the server's certificate.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.transport import CorruptTransferError, NotAuthenticatedError, PeerLostError
from kv_transfer.transports.frame_socket import FrameSocket

_RECORD_BYTES = 16 * 1024
"""TLS puts at most so much into one record; a write of more would not return before all is out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContexts:
    """What a process needs for both directions; made once."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate_digest: bytes
    """SHA-256 of the certificate that this process shows."""

    @staticmethod
    def load(*, certificate: Path, key: Path, ca: Path) -> TlsContexts:
        """From PEM files; raises OSError (of which `ssl.SSLError` is one) or ValueError.

        Both ends must show a certificate that `ca` has signed.
        """
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(ca)
            context.load_cert_chain(certificate, key)
            contexts.append(context)
        server, client = contexts
        # A ticket that nobody reads would make the system reset a connection that is closed.
        server.num_tickets = 0
        shown = ssl.PEM_cert_to_DER_cert(_first_certificate(certificate))
        return TlsContexts(
            server=server, client=client, certificate_digest=hashlib.sha256(shown).digest()
        )


class TlsFrameSocket(FrameSocket):
    """Frames inside TLS. Descriptors cannot be passed.

    TLS 1.3 has no renegotiation, so that once the handshake is over, reading waits only for bytes
    and writing only for room.
    """

    def __init__(self, connection: ssl.SSLSocket, own_digest: bytes | None) -> None:
        """Take over a connected socket; a server gives the digest of its own certificate."""
        super().__init__(connection)
        self._tls = connection
        self._own_digest = own_digest

    @staticmethod
    def accepted(connection: socket.socket, contexts: TlsContexts) -> TlsFrameSocket:
        """Over a connection from a peer; OSError if it has ended."""
        _check_is_open(connection)
        wrapped = contexts.server.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        return TlsFrameSocket(wrapped, contexts.certificate_digest)

    @staticmethod
    def connected(connection: socket.socket, contexts: TlsContexts) -> TlsFrameSocket:
        """Over a connection to a peer; OSError if it has ended."""
        _check_is_open(connection)
        wrapped = contexts.client.wrap_socket(connection, do_handshake_on_connect=False)
        return TlsFrameSocket(wrapped, None)

    async def handshake(self) -> bytes:
        """Agree on keys; both ends name the connection by the server's certificate."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._ready(loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(loop.add_writer, loop.remove_writer)
            except ssl.SSLEOFError as error:
                raise PeerLostError("the peer closed the connection during TLS") from error
            except ssl.SSLError as error:
                raise NotAuthenticatedError(f"no TLS: {_reason(error)}") from error
            except OSError as error:
                raise PeerLostError(f"connection lost: {error}") from error
        if self._own_digest is not None:
            return self._own_digest
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None, "a certificate was required"
        return hashlib.sha256(shown).digest()

    def _receive_some(self, view: memoryview) -> int | None:
        try:
            received = self._tls.recv_into(view)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError as error:
            raise CorruptTransferError(f"TLS: {_reason(error)}") from error
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error
        if not received:
            raise PeerLostError("the peer closed the connection")
        return received

    def _send_some(self, pieces: Sequence[memoryview], descriptor: int | None) -> int | None:
        assert descriptor is None, "TLS passes no descriptors"
        try:
            return self._tls.send(pieces[0][:_RECORD_BYTES])
        except ssl.SSLWantWriteError:
            return None
        except OSError as error:
            raise PeerLostError(f"connection lost: {error}") from error


def _check_is_open(connection: socket.socket) -> None:
    """OSError if the peer is gone: Python's wrapper would leave that connection's socket open."""
    connection.getpeername()


def _first_certificate(path: Path) -> str:
    """The one that is shown: a file may hold the chain to the authority behind it."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = path.read_text(encoding="ascii").partition(begin)
    if not found:
        raise ValueError(f"{path} holds no certificate")
    return f"{begin}{rest.partition(end)[0]}{end}\n"


def _reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, without its place in OpenSSL."""
    return str(error.reason or error).replace("_", " ").lower()
