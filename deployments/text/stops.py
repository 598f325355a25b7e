"""Finding stop strings in text that arrives in pieces; pure and synchronous."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopFilter"]


class _Matcher:
    """One stop string, and how many of its first characters the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Always below len(stop)."""
        self._fallback = _fallbacks(stop)

    def advance(self, character: str) -> bool:
        """Take the next character; whether the text now ends with the whole stop string."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        is_complete = matched == len(self.stop)
        # After a whole match that may not end the text, its longest border may begin another one.
        self.matched = self._fallback[-1] if is_complete else matched
        return is_complete


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of stop: length of its longest proper suffix that also begins stop."""
    lengths = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = lengths[length - 1]
        if stop[position] == stop[length]:
            length += 1
        lengths[position] = length
    return lengths


class StopFilter:
    """Lets text through that can no longer be part of a stop string, and ends before the first one.

    The first stop string is the one that would be complete first if the text came character by
    character (of several complete at once: the longest), so the result does not depend on how the
    text is cut into pieces. Pieces come out whole: one that may begin a stop string waits, all of
    it, for the next; only the end cuts a piece.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first: it wins where several are complete with the same character.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._pieces: deque[str] = deque()
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """Take the next piece; returns the text that is certain now.

        With may_stop false a stop string that is complete in this piece is ordinary text.
        """
        if not self._matchers:
            return piece
        if not piece:
            return ""
        self._pieces.append(piece)
        for position, character in enumerate(piece, start=1):
            stop = self._advance(character)
            if stop is not None and may_stop:
                return self._end(stop, cut=len(piece) - position)
        return self._release()

    def flush(self) -> str:
        """Everything still held back: the text ended otherwise."""
        held = "".join(self._pieces)
        self._pieces.clear()
        return held

    def _advance(self, character: str) -> str | None:
        complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return complete[0] if complete else None

    def _end(self, stop: str, *, cut: int) -> str:
        """The text before a stop string that is complete `cut` characters before the end."""
        self.matched = stop
        held = self.flush()
        return held[: len(held) - cut - len(stop)]

    def _release(self) -> str:
        held = sum(map(len, self._pieces))
        wanted = max(matcher.matched for matcher in self._matchers)
        released: list[str] = []
        while self._pieces and held - len(self._pieces[0]) >= wanted:
            held -= len(self._pieces[0])
            released.append(self._pieces.popleft())
        return "".join(released)
