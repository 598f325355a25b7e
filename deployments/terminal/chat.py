"""The interactive chat: reads lines, writes answers as they come, keeps the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from deployments.terminal.answers import Api, Write, ask
from deployments.terminal.errors import ApiError

__all__ = ["Conversation", "Terminal", "run_chat"]

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


class Terminal(Protocol):
    """Where the lines come from and the answers go."""

    @property
    def is_interactive(self) -> bool:
        """Whether a person types; otherwise lines come from a pipe or a file."""
        ...

    def read(self) -> str:
        """The next line; EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        ...

    def write(self, text: str) -> None:
        """Show a piece of an answer at once."""
        ...

    def note(self, text: str) -> None:
        """Say something that is not part of an answer."""
        ...


class Conversation:
    """The messages so far, and how the next one is asked for."""

    def __init__(
        self, api: Api, *, model: str, sampling: Mapping[str, Any], system: str | None = None
    ) -> None:
        self._api = api
        self._request = {"model": model, **sampling}
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the next request starts with."""
        return [*self._system, *self._turns]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()

    def ask(self, text: str, write: Write) -> str | None:
        """Write the answer to `text`; returns its finish reason.

        An answer stopped by Ctrl-C stays in the conversation as far as it came; one that failed
        does not, nor does its question.
        """
        question = {"role": "user", "content": text}
        body = {**self._request, "messages": [*self.messages, question]}
        parts: list[str] = []

        def write_and_keep(part: str) -> None:
            parts.append(part)
            write(part)

        try:
            finish_reason = ask(self._api, "chat/completions", body, write_and_keep)
        except KeyboardInterrupt:
            if parts:
                self._remember(question, parts)
            raise
        self._remember(question, parts)
        return finish_reason

    def _remember(self, question: dict[str, str], parts: list[str]) -> None:
        self._turns += [question, {"role": "assistant", "content": "".join(parts)}]


def run_chat(conversation: Conversation, terminal: Terminal) -> None:
    """Talk until the input ends or /exit.

    Where nobody types, the first error ends it (ApiError), and Ctrl-C as well.
    """
    if terminal.is_interactive:
        terminal.note(_HELP)
    while True:
        try:
            line = terminal.read().strip()
        except EOFError:
            if terminal.is_interactive:
                terminal.write("\n")  # Ctrl-D leaves the cursor behind the prompt
            return
        except KeyboardInterrupt:
            if not terminal.is_interactive:
                raise
            terminal.write("\n")
            terminal.note(_HELP)
            continue
        if line == "/exit":
            return
        if line:
            _take(line, conversation, terminal)


def _take(line: str, conversation: Conversation, terminal: Terminal) -> None:
    if line == "/reset":
        conversation.reset()
        terminal.note("The conversation starts over.")
    elif line == "/help" or _looks_like_a_command(line):
        terminal.note(_HELP)
    else:
        _answer(line, conversation, terminal)


def _looks_like_a_command(line: str) -> bool:
    """One word after a slash; `/etc/hosts is what?` is a question."""
    return line.startswith("/") and line[1:].isalpha()


def _answer(line: str, conversation: Conversation, terminal: Terminal) -> None:
    try:
        finish_reason = conversation.ask(line, terminal.write)
    except KeyboardInterrupt:
        if not terminal.is_interactive:
            raise
        terminal.write("\n")
        terminal.note("Stopped.")
    except ApiError as error:
        if not terminal.is_interactive:
            raise
        terminal.write("\n")
        terminal.note(f"{error} The question was dropped; /reset starts over.")
    else:
        terminal.write("\n")
        if finish_reason == "length":
            terminal.note("The answer is at its token limit (--max-tokens).")
