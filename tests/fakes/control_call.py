"""Who answers what our processes ask each other without knowing the deployment's secret."""

from __future__ import annotations

from typing import cast

import msgspec

from deployments.call_gate import CallGate
from kv_transfer.authentication import Purpose
from kv_transfer.sealing import OpenedCall, SealedCall
from tests.fakes.handle import Reply
from tests.fakes.prefill_call import OTHER_SECRET

__all__ = ["GullibleGate", "unsealed"]


class GullibleGate(CallGate):
    """Of an impostor: takes any call for one of its own deployment, and answers it as such.

    A gate that asks for the other secret refuses our calls, so nothing that is behind it can show
    what a caller makes of its answer.
    """

    def __init__(self) -> None:
        super().__init__(OTHER_SECRET)

    def open(self, purpose: Purpose, message: object) -> OpenedCall | None:
        """See `CallGate.open`."""
        head = len(SealedCall(OTHER_SECRET, purpose, b"").message)
        own = SealedCall(OTHER_SECRET, purpose, cast("bytes", message)[head:])
        return super().open(purpose, own.message)


def unsealed(answer: object) -> Reply:
    """A replica that says what one of ours would, without a seal."""

    async def reply(_: bytes) -> bytes:
        return msgspec.msgpack.encode(("unsealed", answer))

    return reply
