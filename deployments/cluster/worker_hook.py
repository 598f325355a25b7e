"""Keeps the replicas' gRPC servers on loopback.

Serve binds the server through which replicas call each other to every interface, whatever host
is configured. Ray runs `keep_grpc_on_loopback` in each worker process before anything else; a
worker whose hook fails does not start, so an upgrade that moves the function cannot pass unseen.
"""

import sys
from typing import Any

from ray._common import tls_utils

_REPLICA_MODULE = "ray.serve._private.replica"


def narrow_address(address: str) -> str:
    """The address with the same port on loopback."""
    return f"127.0.0.1:{address.rpartition(':')[2]}"


def keep_grpc_on_loopback() -> None:
    """Make Ray's helper that opens a gRPC port open it on loopback only."""
    add_port = tls_utils.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> Any:
        return add_port(server, narrow_address(address))

    tls_utils.add_port_to_grpc_server = add_loopback_port
    replica = sys.modules.get(_REPLICA_MODULE)
    if replica is not None:  # it took the name with `from ... import`
        vars(replica)["add_port_to_grpc_server"] = add_loopback_port
