"""One thread that runs an engine's steps, so that the event loop never waits for a forward pass.

A daemon thread rather than an executor: the interpreter joins executor threads when it exits, and
a step that hangs in a kernel would then keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.engine.step import StepPlan, StepResult
from workers.runner_choice import RunnerChoice


class ModelRunner(Protocol):
    """Does what a plan says; called from one thread, one step at a time."""

    @property
    def choice(self) -> RunnerChoice:
        """By which way the model is run, and why it is that one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute KV for every row, and sample where the plan asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    plan: StepPlan
    future: asyncio.Future[StepResult]
    loop: asyncio.AbstractEventLoop


class StepThread:
    """Runs a model runner in its own thread; awaited from one event loop."""

    def __init__(self, runner: ModelRunner, *, name: str = "engine-step") -> None:
        self._runner = runner
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queue a step; the future gets its result, or what the runner raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._jobs.put(_Job(plan=plan, future=future, loop=loop))
        return future

    def close(self) -> None:
        """Let the thread end after the step that it is in; does not wait for it."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; False if it has not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer = self._execute(job)
            # The loop may be closed by now if nobody waits for this step any more.
            with contextlib.suppress(RuntimeError):
                job.loop.call_soon_threadsafe(answer)

    def _execute(self, job: _Job) -> Callable[[], None]:
        """Run one step; returns what delivers its outcome on the loop."""
        try:
            result = self._runner.execute(job.plan)
        except BaseException as raised:  # noqa: BLE001 - carried to the awaiting side, not handled here
            error = raised
            return lambda: _settle(job.future, error)
        return lambda: _settle(job.future, result)


def _settle(future: asyncio.Future[StepResult], outcome: StepResult | BaseException) -> None:
    if future.done():  # cancelled: nobody waits for it
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
