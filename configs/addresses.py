"""What an address that something listens on, or connects to, says about who can reach it."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback"]


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
