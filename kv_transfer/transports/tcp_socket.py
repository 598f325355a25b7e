"""TCP sockets with windows large enough for blocks, as the transports listen and connect."""

from __future__ import annotations

import asyncio
import socket

from kv_transfer.transport import PeerLostError
from kv_transfer.transports.frame_socket import SOCKET_BUFFER_BYTES

_BACKLOG = 256


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, on any free port if it is 0, and its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Accepted sockets inherit it; set later, the window would already be fixed.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    host, port = listener.getsockname()[:2]
    return listener, f"{host}:{port}"


async def dial(address: str) -> socket.socket:
    """A connection to a `host:port`; `PeerLostError` if there is none to be had."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # Before connecting: the window's scale is agreed on in the first packet.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    except OSError as error:
        connection.close()
        raise PeerLostError(f"cannot connect to {address}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection
