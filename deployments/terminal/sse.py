"""Server-sent events from bytes, as a client of a streaming HTTP API needs them. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

__all__ = ["decode_events"]


def decode_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Data of each event, in order; comments and other fields are skipped.

    Chunks may end anywhere, inside a character too. An event that no blank line ends is dropped,
    as the standard says: it may be half of one.
    """
    data: list[str] = []
    for line in _split_lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))


def _split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines without their ends.

    Ends are LF, CR LF and CR alone; str.splitlines would also split at U+2028 and others, which
    JSON may hold unescaped.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for chunk in chunks:
        rest += decoder.decode(chunk)
        # A CR at the very end may be the first half of CR LF: it waits for the next chunk.
        held = "\r" if rest.endswith("\r") else ""
        text = rest.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n") + held
        *lines, rest = text.split("\n")
        yield from lines
