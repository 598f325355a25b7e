"""What Front and a decode worker tell each other, and its bytes; nothing else.

A frame is the length of its body (4 bytes), its kind (1 byte) and the body, which is MessagePack:
unlike a pickle it says values and never what to call, and each kind's body is checked against its
type before anybody sees it. The length is checked before the body is waited for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.msgpack import Decoder, Encoder

from workers.messages import (
    Failed,
    Finished,
    GenerateRequest,
    Heartbeat,
    PromptFrame,
    TokenFrame,
    WorkerEvent,
    WorkerLoad,
)

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_EVENTS",
    "WINDOW_EVENTS",
    "BrokenFrameError",
    "Cancel",
    "Credit",
    "Events",
    "Frame",
    "FrameBuffer",
    "Open",
    "encode_frame",
    "pieces",
]

MAX_BODY_BYTES: Final = 16 * 2**20
"""Of one frame: a prompt of three million tokens, or MAX_EVENTS of the largest pieces."""
MAX_EVENTS: Final = 128
"""Of one `Events` frame."""
WINDOW_EVENTS: Final = 64
"""Events of one request that are on their way or not yet read; then its worker keeps the others
back, so that a reader that is slow costs neither the other requests nor Front's memory."""
_SCORES_IN_PIECE = 128
"""Prompt tokens in one event: with 20 alternatives each, 45 kB."""

_HEADER = struct.Struct("!IB")


class BrokenFrameError(Exception):
    """The other end does not keep to the protocol; the connection is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Front: generate this. `call` names it on this connection, and is never used again."""

    call: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Front: stop this; nothing of it is read any more. Without effect if it has ended."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Front: so many events were read; as many more may come."""

    call: int
    events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Worker: what happened since the last frame, of all requests; the first one greets."""

    events: tuple[tuple[int, WorkerEvent], ...] = ()
    """With the call that each belongs to, in order."""
    load: WorkerLoad | None = None
    """Of the worker, where it is sent anew; its requests are those of others than the reader."""


Frame = Open | Cancel | Credit | Events

_WireEvents = tuple[WorkerLoad | None, tuple[tuple[int, int, msgspec.Raw], ...]]
"""`Events` on the wire: each with its call and the place of its type in `_EVENT_TYPES`."""

_EVENTS_KIND = 4
_KINDS: Final[Mapping[type[Frame], int]] = MappingProxyType(
    {Open: 1, Cancel: 2, Credit: 3, Events: _EVENTS_KIND}
)
_EVENT_TYPES: Final = (TokenFrame, PromptFrame, Finished, Failed, Heartbeat)
_EVENT_KINDS: Final = MappingProxyType({kind: place for place, kind in enumerate(_EVENT_TYPES)})


def encode_frame(frame: Frame) -> bytes:
    """The whole frame; ValueError if it is above the bound."""
    encoder = Encoder()
    if isinstance(frame, Events):
        events = [(call, _EVENT_KINDS[type(event)], event) for call, event in frame.events]
        body = encoder.encode((frame.load, events))
    else:
        body = encoder.encode(frame)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{type(frame).__name__} of {len(body)} bytes, at most {MAX_BODY_BYTES}")
    return _HEADER.pack(len(body), _KINDS[type(frame)]) + body


def pieces(event: WorkerEvent) -> Iterator[WorkerEvent]:
    """The event in parts that are small enough to stand beside others; mostly itself."""
    if not isinstance(event, PromptFrame) or len(event.logprobs) <= _SCORES_IN_PIECE:
        yield event
        return
    for start in range(0, len(event.logprobs), _SCORES_IN_PIECE):
        yield replace(event, logprobs=event.logprobs[start : start + _SCORES_IN_PIECE])


class FrameBuffer:
    """Bytes as they come, frames as soon as they are whole."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._events = Decoder(_WireEvents)
        self._event_decoders: tuple[Decoder[WorkerEvent], ...] = tuple(map(Decoder, _EVENT_TYPES))
        self._decoders: Mapping[int, Decoder[Open] | Decoder[Cancel] | Decoder[Credit]] = {
            _KINDS[Open]: Decoder(Open),
            _KINDS[Cancel]: Decoder(Cancel),
            _KINDS[Credit]: Decoder(Credit),
        }

    def feed(self, received: bytes) -> list[Frame]:
        """The frames that these bytes complete; raises `BrokenFrameError`."""
        self._received += received
        frames: list[Frame] = []
        start = 0
        while (end := self._end_of_frame(start)) is not None:
            kind = self._received[start + _HEADER.size - 1]
            frames.append(self._decode(kind, bytes(self._received[start + _HEADER.size : end])))
            start = end
        del self._received[:start]
        return frames

    def _end_of_frame(self, start: int) -> int | None:
        """Where the frame that begins at `start` ends, if it is all there."""
        if len(self._received) - start < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(self._received, start)
        if kind != _EVENTS_KIND and kind not in self._decoders:
            raise BrokenFrameError(f"unknown kind of frame {kind}")
        if length > MAX_BODY_BYTES:
            raise BrokenFrameError(f"frame of {length} bytes, at most {MAX_BODY_BYTES}")
        end: int = start + _HEADER.size + length
        return end if end <= len(self._received) else None

    def _decode(self, kind: int, body: bytes) -> Frame:
        try:
            if kind == _EVENTS_KIND:
                return self._decode_events(body)
            return self._decoders[kind].decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BrokenFrameError(f"body of kind {kind} is not what it should be") from error

    def _decode_events(self, body: bytes) -> Events:
        load, wire_events = self._events.decode(body)
        events = tuple((call, self._decode_event(kind, raw)) for call, kind, raw in wire_events)
        return Events(events=events, load=load)

    def _decode_event(self, kind: int, raw: msgspec.Raw) -> WorkerEvent:
        if not 0 <= kind < len(self._event_decoders):
            raise BrokenFrameError(f"unknown kind of event {kind}")
        return self._event_decoders[kind].decode(raw)
