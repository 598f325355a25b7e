"""A chat's two ends: lines and keys typed by a script, answers scripted piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from deployments.terminal.client import Json


class FakeTerminal:
    """Types the given lines; an exception among them is raised instead."""

    def __init__(self, lines: Sequence[str | BaseException], *, is_interactive: bool) -> None:
        self._lines = list(lines)
        self._is_interactive = is_interactive
        self.written = ""
        self.notes: list[str] = []

    @property
    def is_interactive(self) -> bool:
        return self._is_interactive

    def read(self) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def write(self, text: str) -> None:
        self.written += text

    def note(self, text: str) -> None:
        self.notes.append(text)


class FakeApi:
    """Gives one scripted answer per request; an exception among the pieces is raised there."""

    def __init__(
        self, *answers: Sequence[str | BaseException], finish_reason: str = "stop"
    ) -> None:
        self._answers = list(answers)
        self._finish_reason = finish_reason
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self._streams: list[Generator[Json, None, None]] = []

    def post(self, path: str, body: Json) -> Json:
        pieces = [str(piece) for piece in self._begin(body)]
        message = {"content": "".join(pieces)}
        return {"choices": [{"message": message, "finish_reason": self._finish_reason}]}

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        chunks = self._stream(body)
        self._streams.append(chunks)  # only closing it ends it, not that it is forgotten
        return chunks

    def _stream(self, body: Json) -> Generator[Json, None, None]:
        self.num_open += 1
        try:
            for piece in self._begin(body):
                if isinstance(piece, BaseException):
                    raise piece
                yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
            yield {"choices": [{"delta": {}, "finish_reason": self._finish_reason}]}
            yield {"choices": []}
        finally:
            self.num_open -= 1

    def _begin(self, body: Json) -> Sequence[str | BaseException]:
        self.bodies.append(dict(body))
        return self._answers.pop(0)
