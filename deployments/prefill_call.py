"""The call by which decode asks prefill for a prompt: what its bytes are, and who may make it.

It rides on a Serve handle, which says nothing of who is at its other end, so the call and each of
its answers are sealed (`kv_transfer.sealing`). Bodies are MessagePack, as on the token channel:
they say values and never what to call, and are checked against their types.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, Literal

import msgspec
import msgspec.msgpack

from deployments.call_gate import OTHER_VERSION, CallGate
from kv_transfer.authentication import Purpose, Secret
from kv_transfer.sealing import REFUSAL, SealedCall
from kv_transfer.transport import LinkRefusedError
from workers.messages import (
    FailureCode,
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
)

__all__ = ["PrefillCall", "PrefillDoor"]

_EVENT_TYPES: Final[tuple[type[PrefillEvent], ...]] = (
    PrefillAccepted,
    PrefillEnded,
    PrefillRefused,
)
_WireEvent = tuple[Literal[0, 1, 2], msgspec.Raw]
"""An answer's body: the place of its type in _EVENT_TYPES, and what it says."""


class PrefillCall:
    """One call, as the decode worker makes it."""

    def __init__(self, secret: Secret, request: PrefillRequest) -> None:
        self._sealed = SealedCall(secret, Purpose.PREFILL_CALL, msgspec.msgpack.encode(request))

    @property
    def message(self) -> bytes:
        """What goes to the prefill worker."""
        return self._sealed.message

    def open(self, answer: object) -> PrefillEvent:
        """What the next answer says; `NotAuthenticatedError` if it is not what must come next."""
        body = self._sealed.open(answer)
        try:
            kind, event = msgspec.msgpack.decode(body, type=_WireEvent)
            decoded = msgspec.msgpack.decode(event, type=_EVENT_TYPES[kind])
        except msgspec.MsgspecError as error:
            raise LinkRefusedError(f"a prefill worker answered: {OTHER_VERSION}") from error
        return decoded


class PrefillDoor:
    """Has a prefill worker answer the calls of this deployment, and nobody else's."""

    def __init__(
        self,
        prefill: Callable[[PrefillRequest], AsyncGenerator[PrefillEvent, None]],
        *,
        gate: CallGate,
    ) -> None:
        """`prefill` is `PrefillWorker.prefill`."""
        self._prefill = prefill
        self._gate = gate

    async def prefill(self, message: object) -> AsyncGenerator[bytes, None]:
        """The worker's answers, sealed; to a stranger `REFUSAL`, and the worker hears nothing."""
        call = self._gate.open(Purpose.PREFILL_CALL, message)
        if call is None:
            yield REFUSAL
            return
        async with aclosing(self._answers(call.body)) as events:
            async for event in events:
                kind = _EVENT_TYPES.index(type(event))
                yield call.seal(msgspec.msgpack.encode((kind, event)))

    def _answers(self, body: bytes) -> AsyncGenerator[PrefillEvent, None]:
        try:
            request = msgspec.msgpack.decode(body, type=PrefillRequest)
        except msgspec.MsgspecError:
            return _refuse_another_version()
        return self._prefill(request)


async def _refuse_another_version() -> AsyncGenerator[PrefillEvent, None]:
    """The secret is ours, what is said with it is not understood."""
    yield PrefillRefused(code=FailureCode.INTERNAL, message=f"decode worker: {OTHER_VERSION}")
