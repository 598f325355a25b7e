"""Which network device UCX uses for the address that a worker is told to use, and no other.

UCX listens on every device that it may use; so it may use one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.addresses import interface_of

__all__ = [
    "NIXL_IS_MISSING",
    "RdmaDevices",
    "RdmaOutlook",
    "choose_device",
    "find_rdma_devices",
    "outlook",
]

NIXL_IS_MISSING = (
    "transport nixl needs the package nixl-cu13: pip install 'baton-serve[rdma]', after torch, or "
    "set transfer.transport to auto or tcp"
)

RdmaDevices = Mapping[str, str]
"""Network interface to the RDMA device, with its port, that is the same hardware."""

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaOutlook:
    """What the nixl transport would have on this host."""

    is_installed: bool
    """Whether the optional package is there."""
    device: str | None
    """What UCX would use; None where there is a problem."""
    is_rdma: bool
    """Whether that is RDMA hardware; elsewhere nixl works, and is slower than tcp."""
    problem: str = ""
    """Why it cannot be used: there is no device, or the package that is there does not load."""

    @property
    def is_best(self) -> bool:
        """Whether it is the best there is between hosts."""
        return self.is_installed and self.is_rdma and not self.problem


def outlook(
    host: str,
    wanted: str | None,
    *,
    is_installed: bool,
    addresses: Mapping[str, Sequence[str]],
    rdma_devices: RdmaDevices,
) -> RdmaOutlook:
    """What there is for workers that listen on `host`; `wanted` is the setting of the device."""
    try:
        device = wanted or choose_device(host, addresses, rdma_devices)
    except ValueError as error:
        return RdmaOutlook(
            is_installed=is_installed, device=None, is_rdma=False, problem=str(error)
        )
    return RdmaOutlook(
        is_installed=is_installed, device=device, is_rdma=device in rdma_devices.values()
    )


def find_rdma_devices(root: Path = _INFINIBAND) -> RdmaDevices:
    """The RDMA devices of this host, by their interfaces; none where there is no such hardware.

    The kernel lists RDMA devices under `root`, and under each the interfaces of its hardware
    (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
    """
    return {
        interface.name: f"{device.name}:1"
        for device in _children(root)
        for interface in _children(device / "device" / "net")
    }


def choose_device(
    host: str, addresses: Mapping[str, Sequence[str]], rdma_devices: RdmaDevices
) -> str:
    """UCX's name of the device that has `host`: the interface's RDMA device if any, or itself.

    `addresses` are those of each interface. ValueError where none of them has `host`.
    """
    interface = interface_of(host, addresses)
    return rdma_devices.get(interface, interface)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
