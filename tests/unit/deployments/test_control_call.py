"""What our processes ask each other: who is answered, who is heard, what a repeated call does."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import msgspec
import pytest

import deployments.control_call
from deployments.call_gate import CallGate
from deployments.channel.address import ChannelAddress
from deployments.control_call import (
    CHANNEL_ADDRESS,
    DRAIN,
    END_ALL,
    INTRODUCE,
    SNAPSHOT,
    STOP_RESUMING,
    ControlCall,
    ControlDoor,
    Method,
)
from deployments.metrics import WorkerSnapshot, sample
from kv_transfer.authentication import Purpose
from kv_transfer.sealing import REFUSAL, OpenedCall, SealedCall
from tests.fakes.control_call import GullibleGate
from tests.fakes.prefill_call import OTHER_SECRET, SECRET
from workers.runner_choice import RunnerChoice

ADDRESS = ChannelAddress(worker="decode-a", host="127.0.0.1", port=4321)
SHOWN = WorkerSnapshot(
    worker_id="decode-0",
    role="decode",
    samples=(
        sample("baton_steps_total", 3),
        sample("baton_kv_blocks", 0.5, state="free"),
        sample("baton_handoff_wait_seconds_sum", float("inf")),
    ),
    runner=RunnerChoice(tier="stock", cause="own_differs", reason="layer 3 differs"),
)
CHANGES = {STOP_RESUMING: (), DRAIN: (5.0,), END_ALL: ()}
"""What does more than to tell something, and with which arguments these tests ask for it."""
of_all_that_changes_something = pytest.mark.parametrize(
    ("method", "arguments"), CHANGES.items(), ids=[method.name for method in CHANGES]
)


class Process:
    """One that answers, remembers what it was told, and draws the names of a test."""

    def __init__(
        self, secret=SECRET, names: Iterator[int] | None = None, gate: CallGate | None = None
    ) -> None:
        self.told: list[tuple[object, ...]] = []
        self.gate = gate or CallGate(secret)
        number = next(names or count())
        self.name = number.to_bytes(16, "big").hex()
        self.door = ControlDoor(
            self.gate,
            {
                CHANNEL_ADDRESS: self._tell("channel_address", ADDRESS),
                SNAPSHOT: self._tell("snapshot", SHOWN),
                STOP_RESUMING: self._tell("stop_resuming", None),
                DRAIN: self._drain,
                END_ALL: self._tell("end_all", None),
            },
            random_bytes=lambda size: number.to_bytes(size, "big"),
        )

    def _tell(self, name: str, answer: object) -> Callable[[], object]:
        def handler() -> object:
            self.told.append((name,))
            return answer

        return handler

    async def _drain(self, timeout_s: float) -> None:
        self.told.append(("drain", timeout_s))


@pytest.fixture
def process() -> Process:
    return Process()


async def said_by(process: Process, call: ControlCall) -> list[object]:
    """What is heard of one process."""
    return list(call.open_all([await process.door.answer(call.message)]).values())


async def name_of(process: Process) -> str:
    call = ControlCall(SECRET, INTRODUCE)
    (name,) = call.open_all([await process.door.answer(call.message)])
    return name


@pytest.mark.parametrize(
    ("method", "answer"), [(CHANNEL_ADDRESS, ADDRESS), (SNAPSHOT, SHOWN), (INTRODUCE, None)]
)
async def test_an_answer_comes_as_it_was_given(process, method, answer):
    assert await said_by(process, ControlCall(SECRET, method)) == [answer]
    assert process.told == ([(method.name,)] if method is not INTRODUCE else [])
    assert process.gate.num_strangers == 0


def test_what_changes_something_is_known_as_such():
    """So that a method which is added, or is changed to do more, has to come here."""
    declared = [each for each in vars(deployments.control_call).values() if type(each) is Method]
    assert {method for method in declared if method.changes} == CHANGES.keys()
    assert {method for method in declared if not method.changes} == {
        INTRODUCE,
        CHANNEL_ADDRESS,
        SNAPSHOT,
    }


@of_all_that_changes_something
async def test_a_process_that_is_meant_does_what_it_is_told(process, method, arguments):
    name = await name_of(process)
    assert name == process.name
    call = ControlCall(SECRET, method, *arguments, meant_for=["another", name])
    assert await said_by(process, call) == [None]
    assert process.told == [(method.name, *arguments)]


def test_no_two_processes_have_one_name():
    doors = [ControlDoor(CallGate(SECRET), {}) for _ in range(2)]
    assert len({door._me for door in doors}) == 2
    assert all(len(door._me) == 32 for door in doors)


BODY = msgspec.msgpack.encode((SNAPSHOT.name, (), ()))


@pytest.mark.parametrize(
    "message",
    [
        ControlCall(OTHER_SECRET, SNAPSHOT).message,
        SealedCall(SECRET, Purpose.PREFILL_CALL, BODY).message,
        ControlCall(SECRET, SNAPSHOT).message[:-1],
        ControlCall(SECRET, SNAPSHOT).message.replace(b"snapshot", b"introdux"),
        BODY,
        pickle.dumps(SNAPSHOT.name),
        SNAPSHOT.name,
        None,
    ],
    ids=["other secret", "other purpose", "cut", "changed", "plain", "pickle", "text", "nothing"],
)
async def test_a_stranger_s_call_is_refused_counted_and_heard_by_nobody(
    process, message, caplog, monkeypatch
):
    """Nor is it decoded: whoever looked into it here would fail."""
    monkeypatch.setattr(msgspec.msgpack, "decode", None)
    with caplog.at_level(logging.WARNING):
        assert await process.door.answer(message) == REFUSAL

    assert (process.told, process.gate.num_strangers) == ([], 1)
    (line,) = caplog.messages
    assert line.startswith("control call refused reason=")
    assert "snapshot" not in line


@of_all_that_changes_something
async def test_a_call_that_changes_something_is_worth_nothing_at_another_process(
    caplog, method, arguments
):
    """At a replica that was not asked, and at the same one after its restart."""
    names = count()
    asked, *others = [Process(names=names) for _ in range(3)]
    call = ControlCall(SECRET, method, *arguments, meant_for=[await name_of(asked)])
    assert await said_by(asked, call) == [None]

    for process in others:
        assert await process.door.answer(call.message) == REFUSAL
        assert (process.told, process.gate.num_strangers) == ([], 1)
    assert method.name not in caplog.text


@of_all_that_changes_something
async def test_a_call_that_changes_something_and_names_nobody_is_refused(
    process, method, arguments
):
    call = ControlCall(SECRET, method, *arguments)
    assert await process.door.answer(call.message) == REFUSAL
    assert process.told == []


@of_all_that_changes_something
async def test_a_call_that_changes_something_is_taken_once(process, method, arguments):
    call = ControlCall(SECRET, method, *arguments, meant_for=[process.name])
    answers = [await process.door.answer(call.message) for _ in range(3)]

    assert answers[1:] == [REFUSAL, REFUSAL]
    assert (process.told, process.gate.num_strangers) == ([(method.name, *arguments)], 2)
    again = ControlCall(SECRET, method, *arguments, meant_for=[process.name])
    assert await said_by(process, again) == [None], "who knows the secret may ask again"


async def test_a_repeated_question_is_answered_to_its_own_call_alone(process):
    """Who repeats it cannot have the answer taken for that to another call."""
    recorded, asked = ControlCall(SECRET, SNAPSHOT), ControlCall(SECRET, SNAPSHOT)
    answer = await process.door.answer(recorded.message)
    assert asked.open_all([answer]) == {}
    assert list(recorded.open_all([answer]).values()) == [SHOWN]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("snapshot"),
        msgspec.msgpack.encode(("no such method", (), ())),
        msgspec.msgpack.encode((SNAPSHOT.name, (), (1,))),
        msgspec.msgpack.encode((DRAIN.name, (Process().name,), ())),
        msgspec.msgpack.encode((DRAIN.name, (Process().name,), ("soon",))),
        msgspec.msgpack.encode((DRAIN.name, Process().name, (1.0,))),
    ],
)
async def test_a_call_of_another_version_changes_nothing_and_is_no_stranger_s(
    process, body, caplog
):
    call = SealedCall(SECRET, Purpose.CONTROL_CALL, body)
    assert call.open(await process.door.answer(call.message)) == b""
    assert (process.told, process.gate.num_strangers) == ([], 0)


async def test_a_call_for_what_this_kind_of_process_does_not_do_is_no_stranger_s():
    gate = CallGate(SECRET)
    call = SealedCall(SECRET, Purpose.CONTROL_CALL, msgspec.msgpack.encode((END_ALL.name, (), ())))
    assert call.open(await ControlDoor(gate, {}).answer(call.message)) == b""
    assert gate.num_strangers == 0


async def answers_to(call: ControlCall, *processes: Process) -> list[object]:
    return [await process.door.answer(call.message) for process in processes]


async def test_what_does_not_open_hides_nobody_and_is_logged(caplog):
    names = count()
    first, second = Process(names=names), Process(names=names)
    impostor, refusing = Process(gate=GullibleGate()), REFUSAL
    call, other = (ControlCall(SECRET, SNAPSHOT) for _ in range(2))
    one, two = await answers_to(call, first, second)
    (of_another_call,) = await answers_to(other, first)
    (sealed_by_another,) = await answers_to(call, impostor)
    unsealed = msgspec.msgpack.encode(("name", SHOWN))
    false = [refusing, of_another_call, sealed_by_another, one[:-1], unsealed, None, SHOWN]

    said = call.open_all([*false, two, pickle.dumps(SHOWN), one])

    assert said == {second.name: SHOWN, first.name: SHOWN}
    assert len(caplog.messages) == len(false) + 1
    assert all("control answer ignored method=snapshot" in line for line in caplog.messages)
    assert "decode-0" not in caplog.text


async def test_nothing_of_an_answer_is_decoded_before_its_seal_is_checked(process, monkeypatch):
    """Neither of one that has no seal, nor of one whose seal is another's, or of another call."""
    call, other = (ControlCall(SECRET, SNAPSHOT) for _ in range(2))
    (sealed_by_another,) = await answers_to(call, Process(gate=GullibleGate()))
    (of_another_call,) = await answers_to(other, process)
    unsealed = msgspec.msgpack.encode(("name", SHOWN))
    monkeypatch.setattr(msgspec.msgpack, "decode", None)
    assert call.open_all([unsealed, REFUSAL, sealed_by_another, of_another_call]) == {}


async def test_a_process_is_heard_once_whatever_is_repeated(process):
    """Two of one process would be two values of one metric, and no scrape."""
    call = ControlCall(SECRET, SNAPSHOT)
    (answer,) = await answers_to(call, process)
    assert call.open_all([answer, answer]) == {process.name: SHOWN}


async def test_of_two_answers_of_a_process_the_first_is_heard():
    """Who sends it a copy of the call has it answer twice, and the second time later."""
    says = iter([SHOWN, replace(SHOWN, samples=())])
    door = ControlDoor(CallGate(SECRET), {SNAPSHOT: lambda: next(says)})
    call = ControlCall(SECRET, SNAPSHOT)
    answers = [await door.answer(call.message) for _ in range(2)]
    assert list(call.open_all(answers).values()) == [SHOWN]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(("name", {"worker_id": 5})),
        msgspec.msgpack.encode(
            ("name", {"worker_id": "a", "role": "b", "samples": [{"name": "none", "value": 1}]})
        ),
    ],
    ids=["not understood", "garbage", "other type", "no such metric"],
)
async def test_an_answer_of_another_version_is_left_out(body, caplog):
    call = ControlCall(SECRET, SNAPSHOT)
    answer = OpenedCall(SECRET, Purpose.CONTROL_CALL, call.message).seal(body)
    assert call.open_all([answer]) == {}
    assert "does not speak this version" in caplog.text
