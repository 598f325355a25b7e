"""Processes that tests tell what to do, and hear from, in lines of JSON over a socket.

Each is forked from one that has imported what they need, since torch alone takes seconds. That one
has a single thread and runs nothing of ours, so that a fork is as good as a fresh process; it lives
as long as the test run.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

__all__ = ["LineProcess", "Program", "Tell"]

_IMPORTED_BEFORE = ["tests.fakes.kv_owner", "tests.fakes.kv_reader", "kv_transfer.transports.torch"]
_PATIENCE_S = 20.0


class Tell(Protocol):
    """Says something unasked."""

    def __call__(self, **message: Any) -> None: ...


class Program(Protocol):
    """What a process does; each command is a method that takes and gives JSON's types."""

    async def start(self) -> dict[str, Any]:
        """Begin; the first thing that it says."""
        ...

    async def close(self) -> None:
        """End all that it began."""
        ...


MakeProgram = Callable[[dict[str, Any], Tell], Program]


class LineProcess:
    """The test's end of a process; it may be stopped or killed by signals."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self, make: MakeProgram, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start a process that carries out what `make` makes there; the first thing it says."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _fork(make, arguments, theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        first: dict[str, Any] = json.loads(await self._reader.readline())
        self._listening = asyncio.create_task(self._listen())
        return first

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, by itself or by a signal."""
        return self._process.exitcode is None

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have a command carried out; its answer."""
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": number, "do": do, "with": arguments}) + "\n"
        self._writer.write(line.encode())
        async with asyncio.timeout(_PATIENCE_S):
            return await self._answers[number]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def wait(self) -> None:
        """Return once it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        sentinel = self._process.sentinel
        loop.add_reader(sentinel, ended.set)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await ended.wait()
        finally:
            loop.remove_reader(sentinel)

    async def close(self) -> None:
        """Let it end; it may be stopped or dead."""
        with contextlib.suppress(ProcessLookupError):  # it ends at this moment
            if self.is_running:
                self.signal(signal.SIGCONT)
        self._writer.write_eof()
        await self.wait()
        await self._listening
        self._writer.close()
        self._process.join()
        self._process.close()

    def report(self, message: dict[str, Any]) -> None:
        """What it says unasked."""
        raise NotImplementedError

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "id" in message:
                    answer = self._answers[message.pop("id")]
                    if not answer.done():  # nobody waits for it any more
                        answer.set_result(message)
                else:
                    self.report(message)
        except ConnectionError:  # it was killed, and had not read all that it was told
            return


def _fork(make: MakeProgram, arguments: dict[str, Any], connection: socket.socket) -> BaseProcess:
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_BEFORE)
    process = context.Process(target=_obey, args=(make, arguments, connection), daemon=True)
    process.start()
    return process


def _obey(make: MakeProgram, arguments: dict[str, Any], connection: socket.socket) -> None:
    """The process itself: carry out commands until the test's end of the connection closes."""
    asyncio.run(_carry_out(make, arguments, connection))


async def _carry_out(
    make: MakeProgram, arguments: dict[str, Any], connection: socket.socket
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    def tell(**message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    program = make(arguments, tell)
    tell(**await program.start())
    while line := await reader.readline():
        command = json.loads(line)
        answer = getattr(program, command["do"])(**command["with"])
        if inspect.isawaitable(answer):
            answer = await answer
        tell(id=command["id"], **answer)
    await program.close()
    writer.close()
    await writer.wait_closed()
