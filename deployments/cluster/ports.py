"""The ports an instance takes beside its HTTP port.

One window of neighbouring ports per instance, found from its HTTP port, so that two instances
look in different places. Ray's own processes let the kernel choose and are not counted here.
"""

import socket
from dataclasses import dataclass

from deployments.cluster.errors import PortInUseError

LOOPBACK = "127.0.0.1"
WINDOW = 128
# Below the range from which Linux takes the ports of outgoing connections (32768 and up).
FIRST_PORT = 12_000
NUM_WINDOWS = 160
# A port is not given to a new replica for a while after its last one ended, so the range is
# several times the number of ingress replicas that one host runs.
_RESERVED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What each port of an instance is for."""

    metrics: int  # HAProxy's Prometheus page
    stats: int  # HAProxy's status page
    fallback: int  # Serve's own proxy, which answers when no replica does
    fallback_grpc: int
    first_replica: int  # replicas of the ingress deployment: first to last, the last excluded
    last_replica: int


def is_free(host: str, port: int) -> bool:
    """Whether one could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # as servers do: connections of the last one that linger do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose_ports(http_port: int) -> Ports:
    """A window of free ports for the instance that serves on this HTTP port."""
    for attempt in range(NUM_WINDOWS):
        first = FIRST_PORT + (http_port + attempt) % NUM_WINDOWS * WINDOW
        window = range(first, first + WINDOW)
        if http_port not in window and all(is_free(LOOPBACK, port) for port in window):
            return Ports(
                metrics=first,
                stats=first + 1,
                fallback=first + 2,
                fallback_grpc=first + 3,
                first_replica=first + _RESERVED,
                last_replica=first + WINDOW,
            )
    last = FIRST_PORT + NUM_WINDOWS * WINDOW
    raise PortInUseError(f"no {WINDOW} free ports in a row between {FIRST_PORT} and {last}")
