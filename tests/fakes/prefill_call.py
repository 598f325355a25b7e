"""A call for a prompt, and a Serve handle in this process that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from kv_transfer.authentication import Secret
from kv_transfer.handoff import TransferKey
from tests.fakes.block_memory import peer_info
from workers.engine.sampling_params import SamplingParams
from workers.messages import (
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillLoad,
    PrefillRequest,
)

SECRET = Secret("a secret of this deployment, which is long")
OTHER_SECRET = Secret("a secret of that deployment, which is long")
LOAD = PrefillLoad(queued_tokens=7, prompt_token_s=0.25)


def prefill_request(num_tokens: int = 3) -> PrefillRequest:
    """What a decode worker asks for, with something in every field."""
    return PrefillRequest(
        request_id="request-0",
        transfer_id="transfer-0",
        epoch=1,
        decode=peer_info("decode-0", "decode-0's", bytes_per_block=16),
        prompt_token_ids=tuple(100 + number % 900 for number in range(num_tokens)),
        sampling=SamplingParams(
            max_tokens=8, logit_bias=((5, 0.5),), logprobs=2, stop_token_ids=frozenset({1, 2})
        ),
        timeout_s=30.0,
        skip_tokens=1,
        cache_salt="salt",
        num_resumed=1,
    )


def answers(name: str = "prefill-0") -> tuple[PrefillAccepted, PrefillEnded]:
    """What a prefill worker of this name answers."""
    key = TransferKey(
        transfer_id="transfer-0",
        epoch=1,
        prefill_incarnation=f"{name}'s",
        decode_incarnation="decode-0's",
    )
    peer = peer_info(name, f"{name}'s", bytes_per_block=16)
    ended = PrefillEnded(key=key, outcome="confirmed", load=LOAD)
    return PrefillAccepted(key=key, peer=peer, load=LOAD), ended


class FakePrefill:
    """`PrefillWorker.prefill`: says what it is told to say, and remembers what it was asked."""

    def __init__(self, *events: PrefillEvent) -> None:
        self.events = events
        self.requests: list[PrefillRequest] = []

    async def __call__(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        self.requests.append(request)
        for event in self.events:
            yield event


Answering = Callable[[bytes], AsyncGenerator[object, None]]


class FakePrefillHandle:
    """Serve's `DeploymentHandle` of the prefill pool, as far as `PrefillPool` uses it."""

    def __init__(self, *replicas: Answering) -> None:
        """The n-th call goes to the n-th replica."""
        self._replicas = replicas
        self.calls: list[bytes] = []
        self.num_cancelled = 0
        self.ending: list[asyncio.Future[None]] = []
        """Of the calls that were cancelled."""
        self.serializations: list[str] = []

    def options(self, **options: Any) -> FakePrefillHandle:
        assert options["stream"]
        self.serializations.append(options["response_serialization"])
        return self

    @property
    def prefill(self) -> FakePrefillHandle:
        return self

    def remote(self, message: bytes) -> FakeResponse:
        replica = self._replicas[len(self.calls) % len(self._replicas)]
        self.calls.append(message)
        return FakeResponse(self, replica(message))


class FakeResponse:
    """Serve's `DeploymentResponseGenerator`."""

    def __init__(self, handle: FakePrefillHandle, items: AsyncGenerator[object, None]) -> None:
        self._handle = handle
        self._items = items

    async def __aiter__(self) -> AsyncGenerator[object, None]:
        async for item in self._items:
            yield item

    def cancel(self) -> None:
        """As Serve does: the replica's generator ends, a moment later."""
        self._handle.num_cancelled += 1
        self._handle.ending.append(asyncio.ensure_future(self._items.aclose()))
