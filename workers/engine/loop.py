"""The engine: schedules, runs and commits steps, and tells each sequence's owner what happened.

An `Engine` belongs to the event loop that `start` was called on. All of its state is touched on
that loop alone; only the forward pass runs elsewhere, in one thread. Every method except `stop`
is synchronous and quick.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.geometry import BlockId
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.transport import Clock
from workers.engine.events import TERMINAL_EVENTS, Event, SequenceFailed
from workers.engine.pace import Load
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId, StepPlan
from workers.engine.step_thread import ModelRunner, StepThread
from workers.errors import StepFailedError, WorkerStoppingError

_logger = logging.getLogger(__name__)

EventSink = Callable[[Event], None]
"""Called on the engine's loop with each event of one sequence, in order; must not block."""

_CHECK_INTERVAL_S = 1.0
"""Between two self-checks of an idle engine: a check costs about a microsecond per ten blocks."""

_GATHER_SHARE = 0.1
"""Of the time that the prompts which are there will take, as measured: what waiting for more may
cost them in all. Where prompts take little, as on a GPU, so does the wait."""

_MAX_CONSECUTIVE_FAILURES = 2
"""Failed steps in a row after which the runner is taken for broken rather than the step."""

MAX_STEP_S = 120.0
"""After which a step counts as hung. The longest honest one computes a chunk of a prompt: 256
tokens of a model of 8e9 parameters are 4e12 operations, 40 s on a host that makes 1e11 in a second;
twice that where two workers share it, and a first step may compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine's load and of what it has done."""

    total_blocks: int
    free_blocks: int
    reserved_blocks: int
    used_blocks: int
    cached_blocks: int
    """Those that hold KV for whoever finds it, and go when room is needed."""
    quarantined_blocks: int
    block_size: int
    waiting: int
    """Sequences in the ticket queue."""
    queue_limit: int
    by_status: Mapping[SequenceStatus, int]
    """Live sequences, waiting ones included."""
    max_sequences: int
    steps: int
    failed_steps: int
    step_seconds: float
    """Sum over all steps of the time that the runner took."""
    prompt_tokens: int
    """Computed here."""
    prompt_token_s: float | None
    """Seconds that one of them adds to a step, lately; None before the first."""
    output_tokens: int
    """Sampled here or published."""
    prefix_queried_tokens: int
    """Prompt tokens of sequences that were looked up in the prefix cache."""
    prefix_hit_tokens: int
    """Those of them that were found there."""
    stored_blocks: int
    """Blocks that the prefix cache took."""
    evicted_blocks: int
    """Blocks that the prefix cache gave up."""
    finished: int
    aborted: int
    failed: int


class Cores(Protocol):
    """The cores of the host, which others may want as well."""

    def claim(self) -> None:
        """There is something to compute, from now on; safe to repeat."""

    def rest(self) -> None:
        """There is nothing to compute, until the next claim; safe to repeat."""


class Engine:
    """Runs sequences on a model runner; see the module for who may call it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Clock = time.monotonic,
        cores: Cores | None = None,
        gather_s: float = 0.0,
    ) -> None:
        """`cores` are told whenever there begins or ceases to be something to compute.

        An engine that has been idle begins with its first prompts when no other has come with them
        for `gather_s`, or a small part of the time that they will take.
        """
        self._scheduler = scheduler
        self._cores = cores
        self._gather_s = gather_s
        self._thread = StepThread(runner)
        self.runner_choice = runner.choice
        """See `ModelRunner.choice`."""
        self._clock = clock
        self._sinks: dict[SequenceId, EventSink] = {}
        self._next_id = 0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_delivery_due = False
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._consecutive_failures = 0
        self._failed_steps = 0
        self._step_seconds = 0.0
        self._step_started: float | None = None
        """When the step in flight began."""
        self._next_check = 0.0

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run steps on the running event loop."""
        self._thread.start()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")
        self._task.add_done_callback(self._on_run_ended)

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End every sequence with `WorkerStoppingError`, then the loop and the thread.

        The step in flight is waited for, at most timeout_s; its thread is left behind if it hangs.
        Safe to repeat.
        """
        self._is_stopping = True
        if self._failure is None:
            self._scheduler.fail_all(WorkerStoppingError("the worker is stopping"))
            self._deliver()
        self._wake.set()
        self._thread.close()
        if self._task is None:
            return
        _, pending = await asyncio.wait({self._task}, timeout=timeout_s)
        for task in pending:
            _logger.error("engine step did not end in time timeout_s=%s", timeout_s)
            task.cancel()
            await asyncio.wait({task})

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine for good; None while it runs."""
        return self._failure

    @property
    def healthy(self) -> bool:
        """Whether sequences are taken and steps run."""
        is_running = self._failure is None and self._task is not None and not self._is_stopping
        return is_running and not self._is_stuck

    @property
    def _is_stuck(self) -> bool:
        """Whether the step in flight hangs; should it end after all, the engine goes on."""
        started = self._step_started
        return started is not None and self._clock() - started > MAX_STEP_S

    # -- sequences ------------------------------------------------------------------------------

    def submit(
        self,
        *,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        sink: EventSink,
        mode: SequenceMode = SequenceMode.GENERATE,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
        num_resumed: int = 0,
    ) -> SequenceId:
        """Take a sequence; its events go to sink, the first of them after this has returned.

        deadline is monotonic seconds of the engine's clock; the prompt's last num_resumed tokens
        are output of an earlier attempt. Raises what `Scheduler.submit` raises,
        and `WorkerStoppingError` if no steps run; the sink is never called then.
        """
        if not self.healthy:
            raise WorkerStoppingError("the engine takes no sequences: it is not running")
        sequence_id = SequenceId(self._next_id)
        spec = SequenceSpec(
            sequence_id=sequence_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            mode=mode,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
            num_resumed=num_resumed,
        )
        self._scheduler.submit(spec, self._clock())
        self._next_id += 1
        self._sinks[sequence_id] = sink
        self._changed()
        return sequence_id

    def cancel(self, sequence_id: SequenceId) -> bool:
        """End a sequence in any state; False if it has ended already."""
        return self._control(lambda: self._scheduler.cancel(sequence_id))

    def publish(
        self,
        sequence_id: SequenceId,
        first_token: int,
        logprobs: TokenLogprobs | None = None,
        *,
        first_tokens: tuple[int, ...],
    ) -> bool:
        """See `Scheduler.publish`: decode from first_token; False if the sequence has ended."""
        return self._control(
            lambda: self._scheduler.publish(
                sequence_id, first_token, logprobs, first_tokens=first_tokens
            )
        )

    def prefill_here(self, sequence_id: SequenceId) -> bool:
        """See `Scheduler.prefill_here`; False if the sequence has ended."""
        return self._control(lambda: self._scheduler.prefill_here(sequence_id))

    def quarantine(self, sequence_id: SequenceId) -> bool:
        """See `Scheduler.quarantine`: the transfer failed; False if the sequence has ended."""
        return self._control(lambda: self._scheduler.quarantine(sequence_id))

    def fence(self, sequence_id: SequenceId) -> bool:
        """See `Scheduler.fence`: nothing is written any more; False if the sequence has ended."""
        return self._control(lambda: self._scheduler.fence(sequence_id))

    def release(self, sequence_id: SequenceId) -> bool:
        """See `Scheduler.release`: free a HELD sequence; False if it has ended already."""
        return self._control(lambda: self._scheduler.release(sequence_id))

    def generation_of(self, block_id: BlockId) -> int:
        """How often a block was freed; may be called from any thread."""
        return self._scheduler.pool.generations[block_id]

    def load(self) -> Load:
        """What a prompt that came now would meet."""
        return self._scheduler.load()

    def stats(self) -> EngineStats:
        """A snapshot for metrics and for ranking workers."""
        blocks = self._scheduler.pool.counts()
        totals = self._scheduler.totals
        return EngineStats(
            total_blocks=blocks.total,
            free_blocks=blocks.free,
            reserved_blocks=blocks.reserved,
            used_blocks=blocks.used,
            cached_blocks=blocks.cached,
            quarantined_blocks=blocks.quarantined,
            block_size=self._scheduler.pool.block_size,
            waiting=self._scheduler.num_waiting,
            queue_limit=self._scheduler.config.queue_limit,
            by_status=self._scheduler.count_by_status(),
            max_sequences=self._scheduler.config.max_sequences,
            steps=totals.steps,
            failed_steps=self._failed_steps,
            step_seconds=self._step_seconds,
            prompt_tokens=totals.prompt_tokens,
            prompt_token_s=self._scheduler.pace.prompt_token_s,
            output_tokens=totals.output_tokens,
            prefix_queried_tokens=totals.queried_tokens,
            prefix_hit_tokens=totals.hit_tokens,
            stored_blocks=totals.stored_blocks,
            evicted_blocks=totals.evicted_blocks,
            finished=totals.finished,
            aborted=totals.aborted,
            failed=totals.failed,
        )

    # -- steps ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step after step; asleep while there is nothing to compute."""
        while not self._is_stopping:
            self._wake.clear()
            plan = self._scheduler.plan(self._clock())
            self._deliver()
            if plan is None:
                self._rest()
                await self._idle()
                await self._gather()
            else:
                self._claim()
                await self._step(plan)

    def _claim(self) -> None:
        if self._cores is not None:
            self._cores.claim()

    def _rest(self) -> None:
        if self._cores is not None:
            self._cores.rest()

    async def _idle(self) -> None:
        """Sleep until something was submitted or changed, or the next deadline."""
        now = self._clock()
        if now >= self._next_check:
            self._scheduler.check_invariants()
            self._next_check = now + _CHECK_INTERVAL_S
        deadline = self._scheduler.next_deadline
        timer = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(0.0, deadline - now), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _gather(self) -> None:
        """Let prompts that come together be computed in one step, and begin to stream together.

        Else the first of them streams beside the prompts of the others, and whoever follows it is
        computed beside their last tokens.
        """
        gathered, waited_s = 0, 0.0
        while self._gather_s and not self._is_stopping:
            load = self._scheduler.load()
            has_enough = load.queued_tokens >= self._scheduler.config.step_tokens
            if load.num_streams or has_enough or load.queued_tokens <= gathered:
                return
            gathered = load.queued_tokens
            worth_s = _GATHER_SHARE * gathered * (load.prompt_token_s or 0.0)
            wait_s = max(0.0, min(self._gather_s, worth_s - waited_s))
            await asyncio.sleep(wait_s)
            waited_s += wait_s

    async def _step(self, plan: StepPlan) -> None:
        """Run one step in the thread and take in what it gave."""
        started = self._step_started = self._clock()
        future = self._thread.submit(plan)
        try:
            await asyncio.wait({future})  # unlike awaiting it, does not raise the runner's error
        finally:
            self._step_started = None
            future.cancel()  # given up by stop(); no effect on one that is done
        seconds = self._clock() - started
        self._step_seconds += seconds
        error = future.exception()
        if error is None:
            try:
                self._scheduler.commit(future.result())
                self._scheduler.pace.observe(plan, seconds)
                self._consecutive_failures = 0
            except ValueError as mismatch:
                error = mismatch
        if error is not None:
            self._on_step_failed(plan, error)
        self._deliver()

    def _on_step_failed(self, plan: StepPlan, error: BaseException) -> None:
        """End what was in the step; a second failure in a row ends the engine."""
        self._failed_steps += 1
        self._consecutive_failures += 1
        _logger.error(
            "step failed step_id=%s sequence_ids=%s consecutive=%s",
            plan.step_id,
            [entry.sequence_id for entry in plan.sequences],
            self._consecutive_failures,
            exc_info=error,
        )
        # Its text may quote a prompt; the type may not.
        named = type(error).__name__
        self._scheduler.fail_step(StepFailedError(f"step {plan.step_id} failed with {named}"))
        if self._consecutive_failures >= _MAX_CONSECUTIVE_FAILURES:
            raise error

    def _on_run_ended(self, task: asyncio.Task[None]) -> None:
        """The loop has ended: if not by stop(), nothing that is left can go on."""
        self._rest()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None or self._is_stopping:
            return
        _logger.error("engine failed sequences=%s", len(self._sinks), exc_info=error)
        self._failure = error
        self._thread.close()
        # Not through the scheduler: its state may be what is broken. No block is used again.
        self._deliver()
        failed = WorkerStoppingError(f"the engine failed with {type(error).__name__}")
        for sequence_id in list(self._sinks):
            self._tell(SequenceFailed(sequence_id=sequence_id, error=failed))

    # -- events ---------------------------------------------------------------------------------

    def _control(self, change: Callable[[], bool]) -> bool:
        """Apply a change that came from outside; a failed engine's sequences have all ended."""
        if self._failure is not None:
            return False
        is_live = change()
        self._changed()
        return is_live

    def _changed(self) -> None:
        """Something happened between two steps: wake the loop, deliver soon.

        Soon, not at once: a sink is never called from inside the call that it reacts to. And not
        after the step in flight, which may last longer than a transfer.
        """
        self._wake.set()
        if not self._is_delivery_due:
            self._is_delivery_due = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_delivery_due = False
        for event in self._scheduler.take_events():
            self._tell(event)

    def _tell(self, event: Event) -> None:
        """Hand an event to its sink; one that raises harms nobody else."""
        sink = self._sinks[event.sequence_id]
        if isinstance(event, TERMINAL_EVENTS):
            del self._sinks[event.sequence_id]
        try:
            sink(event)
        except Exception:
            _logger.exception(
                "sink raised sequence_id=%s event=%s", event.sequence_id, type(event).__name__
            )
