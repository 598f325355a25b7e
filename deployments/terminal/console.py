"""Standard input, output and error as the chat's terminal."""

from __future__ import annotations

from typing import TextIO

__all__ = ["StandardTerminal"]


class StandardTerminal:
    """Prompts where a person types, reads plain lines where not."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._is_interactive = stdin.isatty() and stdout.isatty()
        if self._is_interactive:
            # Imported for its effect, which a pipe must not get: input() then edits and recalls.
            import readline  # noqa: F401

    @property
    def is_interactive(self) -> bool:
        """See `Terminal`."""
        return self._is_interactive

    def read(self) -> str:
        """See `Terminal`."""
        if self._is_interactive:
            return input("> ")
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return line

    def write(self, text: str) -> None:
        """See `Terminal`."""
        self._stdout.write(text)
        self._stdout.flush()

    def note(self, text: str) -> None:
        """See `Terminal`; on standard error, so that a pipe gets answers only."""
        self._stderr.write(f"{text}\n")
        self._stderr.flush()
