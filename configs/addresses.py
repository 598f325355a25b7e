"""What an address that something listens on, or connects to, says: who can reach it, and where."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

__all__ = ["interface_of", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address, is this machine alone: `localhost` or 127.0.0.0/8,
    ::1. Another name is not, whatever it may resolve to.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(host: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """The network interface that has `host`, an address or `localhost`; ValueError if none has.

    `addresses` are those of each interface.
    """
    wanted = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    for interface, texts in addresses.items():
        if wanted in map(ipaddress.ip_address, texts):
            return interface
    raise ValueError(f"no network interface of this host has the address {host}")
