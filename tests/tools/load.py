"""Clients that ask the same again and again while something happens to the server."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.tools.asking import Ending, ask, story_request

__all__ = ["HANG_S", "NUM_CLIENTS", "REQUEST_TIMEOUT_S", "Load", "answers_of"]

NUM_CLIENTS = 8
REQUEST_TIMEOUT_S = 90.0
"""Of a request, by the server; a client that waits longer has been forgotten."""
HANG_S = REQUEST_TIMEOUT_S + 30.0


RequestOf = Callable[[int], dict[str, Any]]
"""The request of a client, by its number."""


def salted(request: dict[str, Any]) -> dict[str, Any]:
    """A request under a salt of its own: what is found is not handed over."""
    return {**request, "cache_salt": uuid.uuid4().hex}


@dataclass(slots=True, kw_only=True)
class Load:
    """Clients that ask the same again and again, and what each of them was answered."""

    client: httpx.AsyncClient
    expected: list[str]
    request_of: RequestOf = story_request
    is_over: bool = False
    endings: list[tuple[int, Ending]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """Let all clients begin."""
        self.tasks = [asyncio.create_task(self._loop(index)) for index in range(NUM_CLIENTS)]

    async def stop(self) -> None:
        """Let each client finish its last request; TimeoutError if one never does."""
        self.is_over = True
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self.tasks)

    async def _loop(self, index: int) -> None:
        while not self.is_over:
            ending = await ask(self.client, salted(self.request_of(index)))
            self.endings.append((index, ending))
            if len({answered for answered, _ in self.endings}) == NUM_CLIENTS:
                self.all_answered.set()

    def wrong(self) -> list[tuple[int, Ending]]:
        """Answers that are neither the expected text nor a failure that says so."""
        return [
            (index, ending)
            for index, ending in self.endings
            if not ending.is_failure
            and not (ending.is_whole and ending.text == self.expected[index])
        ]

    def failures(self) -> Counter[str]:
        """Failed answers by status and code."""
        return Counter(
            f"{ending.status} {ending.error_code}"
            for _, ending in self.endings
            if ending.is_failure
        )


async def answers_of(client: httpx.AsyncClient, request_of: RequestOf = story_request) -> list[str]:
    """The text of each client's request, asked one at a time."""
    endings = [await ask(client, salted(request_of(index))) for index in range(NUM_CLIENTS)]
    assert all(ending.is_whole for ending in endings)
    return [ending.text for ending in endings]
