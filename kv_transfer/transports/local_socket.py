"""Sockets between processes of one user on one host, and what the kernel says of who is there.

In the abstract namespace: there is no file to guard or to leave behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket

from kv_transfer.transport import LinkRefusedError, PeerLostError
from kv_transfer.transports.frame_socket import FrameSocket, peer_credentials

__all__ = ["dial_local", "listen_locally", "refusal_of_stranger", "watch_process"]

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_BACKLOG_RETRY_S = 0.01


def listen_locally() -> tuple[socket.socket, str]:
    """A socket that listens, and the address that it made up."""
    address = f"@baton-kv-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_socket_name(address))
    listener.listen(_BACKLOG)
    return listener, address


def refusal_of_stranger(accepted: socket.socket) -> str | None:
    """Why who has connected is not to be served, if it is another user."""
    _, user = peer_credentials(accepted)
    return None if user == os.geteuid() else f"user {user} is not {os.geteuid()}"


def watch_process(frames: FrameSocket) -> int | None:
    """A descriptor that can be read once the other end's process has ended."""
    try:
        return os.pidfd_open(frames.peer_process)
    except OSError as error:  # it has ended, is in another process namespace, or this is forbidden
        logger.info("a peer's end cannot be seen from here error=%s", error)
        return None


def _socket_name(address: str) -> str:
    return "\0" + address.removeprefix("@")


async def dial_local(address: str) -> socket.socket:
    """A connection to a process of the same user; `PeerLostError`, `LinkRefusedError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await _connect(connection, address)
        _check_user(connection, address)
    except OSError as error:
        connection.close()
        raise PeerLostError(f"cannot connect to {address}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_user(connection: socket.socket, address: str) -> None:
    _, user = peer_credentials(connection)
    if user != os.geteuid():
        raise LinkRefusedError(f"{address} is user {user}'s, not {os.geteuid()}'s")


async def _connect(connection: socket.socket, address: str) -> None:
    while True:
        try:
            connection.connect(_socket_name(address))
        except BlockingIOError:  # the backlog is full; unlike with tcp, nothing is under way
            await asyncio.sleep(_BACKLOG_RETRY_S)
        else:
            return
