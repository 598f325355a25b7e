"""What our processes ask each other beside requests and prompts, and who may ask it.

These calls ride on Serve handles, to all replicas of a deployment at once. So each, and each
answer, is sealed with the deployment's secret (`kv_transfer.sealing`), and which method is called
is inside the seal. Bodies are MessagePack: they say values and never what to call, and are checked
against their types.

    call = ControlCall(secret, SNAPSHOT)            # the caller
    answer = await door.answer(call.message)        # each replica, by its `ControlDoor`
    said = call.open_all(answers)                   # of those who know the secret, by process

Whoever has recorded a call can make it again. Where it only asks something, that brings what
anybody sees in `/metrics`, an address where everybody has to prove to know the secret, or a name. A
call that changes something holds for the processes that it names, and each of them takes it once.
They draw these names at their start, and the caller asks for them (`INTRODUCE`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Generic, TypeVar

import msgspec
import msgspec.msgpack

from deployments.call_gate import OTHER_VERSION, CallGate
from deployments.channel.address import ChannelAddress
from deployments.metrics import WorkerSnapshot
from kv_transfer.authentication import Purpose, RandomBytes, Secret
from kv_transfer.sealing import REFUSAL, SealedCall
from kv_transfer.transport import NotAuthenticatedError

__all__ = [
    "CHANNEL_ADDRESS",
    "CONTROL",
    "DRAIN",
    "END_ALL",
    "INTRODUCE",
    "SNAPSHOT",
    "STOP_RESUMING",
    "ControlCall",
    "ControlDoor",
    "Method",
]

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

CONTROL: Final = "control"
"""What Serve calls the one method of each deployment that takes these calls."""
_NAME_BYTES: Final = 16
_NOT_UNDERSTOOD: Final = b""
"""The body of an answer to a call of another version; no other one is empty."""

_WireCall = tuple[str, tuple[str, ...], msgspec.Raw]
"""A call's body: its method, the processes that it is meant for, its arguments."""
_WireAnswer = tuple[str, msgspec.Raw]
"""An answer's body: the process that gives it, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Method(Generic[AnswerT]):
    """What can be asked of a process."""

    name: str
    answer: type[AnswerT]
    arguments: Any = tuple[()]
    """The type of all of them together."""
    changes: bool = False
    """Whether it does more than to tell something: its calls say whom they are meant for."""


INTRODUCE: Final = Method(name="introduce", answer=NoneType)
"""What the process is called; every one answers."""
CHANNEL_ADDRESS: Final = Method(name="channel_address", answer=ChannelAddress)
"""Of a decode worker: where Fronts find it."""
SNAPSHOT: Final = Method(name="snapshot", answer=WorkerSnapshot)
"""Of a worker or a Front: its share of `/metrics`."""
STOP_RESUMING: Final = Method(name="stop_resuming", answer=NoneType, changes=True)
"""Of a Front: see `ResumingBackend.stop_resuming`."""
DRAIN: Final = Method(name="drain", arguments=tuple[float], answer=NoneType, changes=True)
"""Of a decode worker, for so many seconds: see `DecodeWorker.drain`."""
END_ALL: Final = Method(name="end_all", answer=NoneType, changes=True)
"""Of a Front: see `ResumingBackend.end_all`."""


class ControlCall(Generic[AnswerT]):
    """One call to all replicas of a deployment, as its caller makes it."""

    def __init__(
        self,
        secret: Secret,
        method: Method[AnswerT],
        *arguments: object,
        meant_for: Collection[str] = (),
    ) -> None:
        """`meant_for` are names of processes; who changes something must be one of them."""
        body = msgspec.msgpack.encode((method.name, tuple(meant_for), arguments))
        self._sealed = SealedCall(secret, Purpose.CONTROL_CALL, body)
        self._method = method

    @property
    def message(self) -> bytes:
        """What goes to the replicas."""
        return self._sealed.message

    def open_all(self, answers: Iterable[object]) -> dict[str, AnswerT]:
        """What each process says that knows the secret, by its name.

        What does not open is logged, and otherwise as if it had not come: so is what is not
        understood, and a second answer of the same process, which somebody has copied.
        """
        said: dict[str, AnswerT] = {}
        for answer in answers:
            try:
                process, word = self._open(answer)
            except NotAuthenticatedError as error:
                self._ignore(str(error))
            except msgspec.MsgspecError:
                self._ignore(OTHER_VERSION)
            else:
                said.setdefault(process, word)
        return said

    def is_answered_by(self, processes: Collection[str], answers: Iterable[object]) -> bool:
        """Whether each of these processes has answered; what else came is not looked at."""
        heard = set()
        for answer in answers:
            with contextlib.suppress(NotAuthenticatedError, msgspec.MsgspecError):
                heard.add(self._open(answer)[0])
        return heard.issuperset(processes)

    def _open(self, answer: object) -> tuple[str, AnswerT]:
        # Each replica's answer is the first one to this call.
        body = copy.copy(self._sealed).open(answer)
        process, word = msgspec.msgpack.decode(body, type=_WireAnswer)
        return process, msgspec.msgpack.decode(word, type=self._method.answer)

    def _ignore(self, reason: str) -> None:
        logger.warning("control answer ignored method=%s reason=%s", self._method.name, reason)


class ControlDoor:
    """Has a process answer the calls of this deployment, and nobody else's."""

    def __init__(
        self,
        gate: CallGate,
        handlers: Mapping[Method[Any], Callable[..., object]],
        *,
        random_bytes: RandomBytes = secrets.token_bytes,
    ) -> None:
        """A handler takes its method's arguments and gives its answer, or an awaitable of it."""
        self._gate = gate
        self._me: Final = random_bytes(_NAME_BYTES).hex()
        self._handlers = {
            method.name: (method, handler)
            for method, handler in {INTRODUCE: _say_nothing, **handlers}.items()
        }
        self._taken: set[bytes] = set()
        """Calls that changed something: a handful, for only who knows the secret can add one."""

    async def answer(self, message: object) -> bytes:
        """The sealed answer; to a stranger `REFUSAL`, and no handler hears of it."""
        call = self._gate.open(Purpose.CONTROL_CALL, message)
        if call is None:
            return REFUSAL
        try:
            name, meant_for, said = msgspec.msgpack.decode(call.body, type=_WireCall)
            method, handler = self._handlers[name]
            arguments = msgspec.msgpack.decode(said, type=method.arguments)
        except (msgspec.MsgspecError, KeyError):
            return call.seal(_NOT_UNDERSTOOD)
        if method.changes and not self._takes(call.message, meant_for):
            return REFUSAL
        answer = handler(*arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        return call.seal(msgspec.msgpack.encode((self._me, answer)))

    def _takes(self, message: bytes, meant_for: Collection[str]) -> bool:
        """Whether a call is for this process, and new; who repeats one need not know the secret."""
        if self._me in meant_for and message not in self._taken:
            self._taken.add(message)
            return True
        self._gate.count_stranger(
            Purpose.CONTROL_CALL, "it is meant for another process, or was made before"
        )
        return False


def _say_nothing() -> None:
    """Every answer has the name of who gives it."""
