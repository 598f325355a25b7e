"""What the two ends of a process group say to each other over the control channel.

Before each fetch the receiver asks for a turn on the pair's group; the owner answers when its end
is free for it. While a group is made, both ends mirror what they write into its store.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.transport import CorruptTransferError

_TURN = struct.Struct("!Q?")
_ENTRY = struct.Struct("!QH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The receiver's: the next fetch is to go over the group of this epoch."""

    epoch: int
    """Grows with each group that this receiver makes with this owner."""
    is_new: bool
    """The group is to be made now."""

    def pack(self) -> bytes:
        """As payload."""
        return _TURN.pack(self.epoch, self.is_new)

    @staticmethod
    def unpack(payload: bytes) -> Turn:
        """Inverse of `pack`; raises `CorruptTransferError`."""
        epoch, is_new = _fields(_TURN, payload)
        return Turn(epoch=epoch, is_new=bool(is_new))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The owner's answer to a turn."""

    epoch: int
    is_paired: bool
    """False: the owner has no such group (any more); nothing is fetched by this turn."""

    def pack(self) -> bytes:
        """As payload."""
        return _TURN.pack(self.epoch, self.is_paired)

    @staticmethod
    def unpack(payload: bytes) -> Ready:
        """Inverse of `pack`; raises `CorruptTransferError`."""
        epoch, is_paired = _fields(_TURN, payload)
        return Ready(epoch=epoch, is_paired=bool(is_paired))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Either side's: what its end of a new group has written into the store."""

    epoch: int
    key: str
    value: bytes

    def pack(self) -> bytes:
        """As payload."""
        key = self.key.encode()
        return _ENTRY.pack(self.epoch, len(key)) + key + self.value

    @staticmethod
    def unpack(payload: bytes) -> Entry:
        """Inverse of `pack`; raises `CorruptTransferError`."""
        epoch, key_length = _fields(_ENTRY, payload[: _ENTRY.size])
        key, value = _parted(payload[_ENTRY.size :], key_length)
        try:
            return Entry(epoch=epoch, key=key.decode(), value=value)
        except UnicodeDecodeError as error:
            raise CorruptTransferError("a store's key is not text") from error


def _fields(layout: struct.Struct, payload: bytes) -> tuple[int, int]:
    if len(payload) != layout.size:
        raise CorruptTransferError(f"{len(payload)} bytes where {layout.size} were expected")
    first, second = layout.unpack(payload)
    return first, second


def _parted(payload: bytes, length: int) -> tuple[bytes, bytes]:
    if len(payload) < length:
        raise CorruptTransferError(f"a key of {length} bytes in {len(payload)}")
    return payload[:length], payload[length:]
