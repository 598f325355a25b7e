from __future__ import annotations

import io
from typing import Any

import pytest

from deployments.terminal.answers import ask
from deployments.terminal.chat import Conversation, Terminal, run_chat
from deployments.terminal.console import StandardTerminal
from deployments.terminal.errors import BrokenAnswerError, RefusedError
from tests.fakes.chat import FakeApi, FakeTerminal


def conversation_with(api: FakeApi, system: str | None = None) -> Conversation:
    return Conversation(api, model="tiny", sampling={"seed": 7}, system=system)


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_answers_are_written_and_become_part_of_the_next_request() -> None:
    api = FakeApi(["Hel", "lo"], ["Bye"])
    terminal = FakeTerminal(["hi", "", "  ", "bye"], is_interactive=False)

    run_chat(conversation_with(api, system="be short"), terminal)

    assert terminal.written == "Hello\nBye\n"
    assert terminal.notes == []
    assert [contents(body) for body in api.bodies] == [
        ["be short", "hi"],
        ["be short", "hi", "Hello", "bye"],
    ]
    assert [message["role"] for message in api.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert all(body["model"] == "tiny" and body["seed"] == 7 for body in api.bodies)


def test_reset_forgets_all_but_the_system_message() -> None:
    api = FakeApi(["a"], ["b"])
    terminal = FakeTerminal(["one", "/reset", "two"], is_interactive=True)

    run_chat(conversation_with(api, system="s"), terminal)

    assert contents(api.bodies[1]) == ["s", "two"]


def test_exit_leaves_what_follows_unread() -> None:
    api = FakeApi()

    run_chat(conversation_with(api), FakeTerminal(["/exit", "more"], is_interactive=True))

    assert api.bodies == []


@pytest.mark.parametrize("line", ["/help", "/rest"])
def test_commands_are_never_sent(line: str) -> None:
    api = FakeApi()
    terminal = FakeTerminal([line], is_interactive=False)

    run_chat(conversation_with(api), terminal)

    assert api.bodies == []
    assert "/reset" in terminal.notes[0]


@pytest.mark.parametrize("line", ["/etc/hosts is what?", "/ or not", "/"])
def test_text_with_a_slash_in_front_is_sent(line: str) -> None:
    api = FakeApi(["ok"])

    run_chat(conversation_with(api), FakeTerminal([line], is_interactive=True))

    assert contents(api.bodies[0]) == [line]


def test_interrupt_stops_the_answer_and_keeps_what_came() -> None:
    api = FakeApi(["Hel", KeyboardInterrupt()], ["ok"])
    terminal = FakeTerminal(["hi", "next"], is_interactive=True)

    run_chat(conversation_with(api), terminal)

    assert terminal.written == "Hel\nok\n\n"
    assert "Stopped." in terminal.notes
    assert contents(api.bodies[1]) == ["hi", "Hel", "next"]
    assert api.num_open == 0


def test_interrupt_before_any_text_drops_the_question() -> None:
    api = FakeApi([KeyboardInterrupt()], ["ok"])

    run_chat(conversation_with(api), FakeTerminal(["hi", "next"], is_interactive=True))

    assert contents(api.bodies[1]) == ["next"]


def test_interrupt_while_writing_closes_the_stream() -> None:
    api = FakeApi(["Hel", "lo"])
    conversation = conversation_with(api)

    def interrupted_write(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("hi", interrupted_write)

    assert api.num_open == 0
    assert [message["content"] for message in conversation.messages] == ["hi", "Hel"]


def test_interrupt_at_the_prompt_does_not_leave() -> None:
    api = FakeApi(["ok"])
    terminal = FakeTerminal([KeyboardInterrupt(), "hi"], is_interactive=True)

    run_chat(conversation_with(api), terminal)

    assert len(api.bodies) == 1


def test_interrupt_in_a_pipe_leaves() -> None:
    for lines in ([KeyboardInterrupt()], ["hi"]):
        api = FakeApi([KeyboardInterrupt()])
        with pytest.raises(KeyboardInterrupt):
            run_chat(conversation_with(api), FakeTerminal(lines, is_interactive=False))


def test_error_is_told_and_its_question_dropped() -> None:
    api = FakeApi(["par", BrokenAnswerError("it broke.")], ["ok"])
    terminal = FakeTerminal(["hi", "next"], is_interactive=True)

    run_chat(conversation_with(api), terminal)

    assert any("it broke." in note for note in terminal.notes)
    assert contents(api.bodies[1]) == ["next"]


def test_error_in_a_pipe_ends_the_chat() -> None:
    api = FakeApi([RefusedError("too long", status=400)])

    with pytest.raises(RefusedError):
        run_chat(conversation_with(api), FakeTerminal(["hi", "next"], is_interactive=False))

    assert len(api.bodies) == 1


def test_answer_at_its_token_limit_is_told() -> None:
    api = FakeApi(["Hel"], finish_reason="length")
    terminal = FakeTerminal(["hi"], is_interactive=False)

    run_chat(conversation_with(api), terminal)

    assert any("--max-tokens" in note for note in terminal.notes)


def test_whole_answer_is_written_at_once() -> None:
    pieces: list[str] = []

    reason = ask(FakeApi(["Hel", "lo"]), "p", {}, pieces.append, is_streamed=False)

    assert pieces == ["Hello"]
    assert reason == "stop"


class OneAnswer(FakeApi):
    """Gives one chunk, whatever it is."""

    def __init__(self, chunk: dict[str, Any]) -> None:
        super().__init__()
        self._chunk = chunk

    def post(self, path: str, body: object) -> dict[str, Any]:
        return self._chunk


@pytest.mark.parametrize("chunk", [{}, {"choices": 1}, {"choices": [1]}])
def test_answer_without_choices_is_broken(chunk: dict[str, Any]) -> None:
    with pytest.raises(BrokenAnswerError, match="without choices"):
        ask(OneAnswer(chunk), "p", {}, print, is_streamed=False)


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"delta": {}},
        {"delta": {"role": "assistant"}},
        {"message": {"content": None}},
        {"text": ""},
    ],
)
def test_choice_without_text_writes_nothing(choice: dict[str, Any]) -> None:
    pieces: list[str] = []

    ask(OneAnswer({"choices": [choice]}), "p", {}, pieces.append, is_streamed=False)

    assert pieces == []


def test_standard_terminal_reads_a_pipe_to_its_end() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal: Terminal = StandardTerminal(io.StringIO("one\ntwo"), out, err)

    terminal.write("answer")
    terminal.note("note")

    assert not terminal.is_interactive
    assert [terminal.read(), terminal.read()] == ["one\n", "two"]
    with pytest.raises(EOFError):
        terminal.read()
    assert (out.getvalue(), err.getvalue()) == ("answer", "note\n")
