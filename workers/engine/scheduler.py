"""Decides what each step computes, and keeps every sequence and block of an engine.

The scheduler owns its sequences, the ticket queue and the pool's bookkeeping. It never waits,
never reads a clock and never touches a tensor: what happens is told to it by method calls, what
follows from it is read with `take_events`. Calls come from one thread.

Rules that hold at every moment:
- A sequence is admitted only with all blocks that it can ever need (INV-ADMIT); from then on
  nothing takes them away, so that nobody is ever preempted for memory.
- The blocks of a sequence that has ended stay taken as long as somebody may still write to them:
  the step in flight until its commit, a transfer until its fence (INV-FENCE).
- Every sequence ends with exactly one terminal event (INV-ONE-END).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.events import (
    Admitted,
    ChunkComputed,
    Event,
    PromptComputed,
    SequenceAborted,
    SequenceFailed,
    SequenceFinished,
    SequenceReleased,
    TerminalEvent,
    TokensSampled,
)
from workers.engine.sequence import Sequence, SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult
from workers.engine.ticket_queue import Ticket, TicketQueue
from workers.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    StepFailedError,
    WorkerError,
)
from workers.messages import FinishReason

_WITH_TRANSFER: Final = frozenset({SequenceStatus.AWAITING_KV, SequenceStatus.QUARANTINED})
"""States in which a transfer may be writing to the sequence's blocks."""

_BY_ADMISSION: Final = attrgetter("admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine."""

    max_model_len: int
    """The window: prompt and output tokens of one sequence."""
    max_sequences: int
    """Sequences that are admitted at a time, HELD ones aside."""
    step_tokens: int
    """Rows of one forward pass at most."""
    prefill_chunk_tokens: int
    """Prompt tokens of one sequence in one step at most."""
    queue_limit: int
    """Sequences that wait at most."""
    aging_s: float = 10.0
    """Seconds of waiting that are worth one level of priority."""

    def __post_init__(self) -> None:
        if min(self.max_model_len, self.max_sequences, self.prefill_chunk_tokens) < 1:
            raise ValueError(f"limits of a scheduler must be at least 1: {self}")
        if self.step_tokens < self.max_sequences:
            # Otherwise a decoding sequence, or the prefill behind it, could get no row in a step.
            raise ValueError(
                f"step_tokens {self.step_tokens} must be at least "
                f"max_sequences {self.max_sequences}: each decodes one token a step"
            )
        if self.queue_limit < 0 or self.aging_s < 0:
            raise ValueError(f"queue_limit and aging_s must not be negative: {self}")


@dataclass(slots=True, kw_only=True)
class Totals:
    """What a scheduler has done since it was made."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed here; those that came from another worker are not counted."""
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class Scheduler:
    """Sequences in, step plans and events out."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._config = config
        self._queue = TicketQueue(limit=config.queue_limit, aging_s=config.aging_s)
        self._live: dict[SequenceId, Sequence] = {}
        self._decoding: dict[SequenceId, Sequence] = {}
        self._prefilling: list[Sequence] = []
        self._num_active = 0
        self._admissions = 0
        self._in_flight: StepPlan | None = None
        self._in_flight_ids: frozenset[SequenceId] = frozenset()
        # Blocks of ended sequences that the step in flight, or a transfer, may still write to.
        self._until_commit: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._until_fence: dict[SequenceId, tuple[BlockId, ...]] = {}
        # Never later than the earliest deadline of a live sequence; may be earlier.
        self._deadline_bound = math.inf
        self._events: list[Event] = []
        self._totals = Totals()

    @property
    def config(self) -> SchedulerConfig:
        """The limits that it was made with."""
        return self._config

    @property
    def pool(self) -> BlockPool:
        """The pool; others only read it."""
        return self._pool

    @property
    def totals(self) -> Totals:
        """Counters since the start; others only read them."""
        return self._totals

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._queue)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def status_of(self, sequence_id: SequenceId) -> SequenceStatus | None:
        """A live sequence's state; None once it has ended."""
        sequence = self._live.get(sequence_id)
        return None if sequence is None else sequence.status

    def count_by_status(self) -> Mapping[SequenceStatus, int]:
        """Live sequences by state; states with none are left out."""
        return Counter(sequence.status for sequence in self._live.values())

    def take_events(self) -> list[Event]:
        """What happened since the call before, in order."""
        events, self._events = self._events, []
        return events

    # -- sequences come and go ------------------------------------------------------------------

    def submit(self, spec: SequenceSpec, now: float) -> None:
        """Admit a sequence, or let it wait.

        Raises `ContextOverflowError` if it can never fit the window, `DeadlineExceededError` if
        it is too late already, `QueueFullError` if too many wait; nothing is kept of it then.
        """
        self._refuse_impossible(spec, now)
        sequence = Sequence.from_spec(spec)
        num_blocks = self._pool.blocks_for(spec.num_reserved_tokens)
        if not (len(self._queue) == 0 and self._try_admit(sequence, num_blocks)):
            self._queue.push(
                Ticket(
                    sequence_id=spec.sequence_id,
                    num_blocks=num_blocks,
                    enqueued_at=now,
                    priority=spec.priority,
                )
            )
        self._live[spec.sequence_id] = sequence
        if spec.deadline is not None:
            self._deadline_bound = min(self._deadline_bound, spec.deadline)
        self._admit()  # it may have become the head, and need less than the head before it

    def cancel(self, sequence_id: SequenceId) -> bool:
        """End a sequence in any state; False if it has ended already."""
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, SequenceStatus.ABORTED, SequenceAborted(sequence_id=sequence_id))
        self._admit()
        return True

    def release(self, sequence_id: SequenceId) -> bool:
        """A HELD sequence's reader is done: free its blocks; False if it has ended already."""
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, SequenceStatus.FINISHED, SequenceReleased(sequence_id=sequence_id))
        self._admit()
        return True

    def fail_all(self, error: WorkerError) -> None:
        """End every sequence with an error, waiting and HELD ones included."""
        for sequence in list(self._live.values()):
            self._fail(sequence, error)

    # -- KV that comes from another worker ------------------------------------------------------

    def publish(self, sequence_id: SequenceId, first_token: int) -> bool:
        """The prompt's KV is in the blocks, proved intact: decode from first_token on.

        False if the sequence has ended; the caller then owes the fence.
        """
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        sequence.move_to(SequenceStatus.DECODING)
        self._decoding[sequence_id] = sequence
        self._computed(sequence, sequence.num_prompt_tokens)
        self._accept(sequence, first_token)
        self._admit()
        return True

    def prefill_here(self, sequence_id: SequenceId) -> bool:
        """Compute the prompt on this worker instead; False if the sequence has ended.

        No transfer may be writing to its blocks: after a failed one, `quarantine` and `fence`.
        """
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        self._start_prefill(sequence)
        return True

    def quarantine(self, sequence_id: SequenceId) -> bool:
        """The transfer into the sequence's blocks failed; False if the sequence has ended.

        `fence` must follow in either case, once the transport can write no more.
        """
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        sequence.move_to(SequenceStatus.QUARANTINED)
        self._pool.quarantine(sequence.block_ids)
        return True

    def fence(self, sequence_id: SequenceId) -> bool:
        """No transfer writes to the sequence's blocks any more; True if the sequence lives.

        A live sequence can be tried again (AWAITING_KV); an ended one's blocks are freed. Safe to
        repeat, and without effect if nothing is quarantined for the sequence.
        """
        block_ids = self._until_fence.pop(sequence_id, None)
        if block_ids is not None:
            self._pool.unquarantine(block_ids)
            self._pool.release(block_ids)
            self._admit()
            return False
        sequence = self._live.get(sequence_id)
        if sequence is not None and sequence.status is SequenceStatus.QUARANTINED:
            sequence.move_to(SequenceStatus.AWAITING_KV)
            self._pool.unquarantine(sequence.block_ids)
        return sequence is not None

    # -- time -----------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail every sequence whose deadline is not after now.

        HELD ones stay: the lease of their reader limits them.
        """
        if now < self._deadline_bound:
            return
        for sequence in list(self._live.values()):
            deadline = sequence.spec.deadline
            if deadline is None or deadline > now or sequence.status is SequenceStatus.HELD:
                continue
            late = DeadlineExceededError(
                f"the deadline passed while the request was {sequence.status.value}, "
                f"after {sequence.num_output_tokens} output tokens"
            )
            self._fail(sequence, late)
        self._deadline_bound = min(
            (
                sequence.spec.deadline
                for sequence in self._live.values()
                if sequence.spec.deadline is not None and sequence.status is not SequenceStatus.HELD
            ),
            default=math.inf,
        )
        self._admit()

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be called if nothing else happens before."""
        return None if self._deadline_bound == math.inf else self._deadline_bound

    # -- steps ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if no sequence has anything to compute.

        Every decoding sequence gets its row first: a gap between tokens is what a reader sees.
        Prompts share what is left in the order of admission: finishing the oldest first gives
        each prompt its first token as early as any order can without delaying an older one, and
        its finished chunks can be handed over soonest. `prefill_chunk_tokens` leaves younger
        prompts a share of the step where step_tokens is larger.
        """
        assert self._in_flight is None, "plan() called while a step is in flight"
        self.expire(now)
        scheduled = [_decode_row(sequence) for sequence in self._decoding.values()]
        budget = self._config.step_tokens - len(scheduled)
        for sequence in self._prefilling:
            if budget == 0:
                break
            chunk = _prompt_chunk(sequence, min(budget, self._config.prefill_chunk_tokens))
            scheduled.append(chunk)
            budget -= len(chunk.token_ids)
        if not scheduled:
            return None
        plan = StepPlan(step_id=self._totals.steps, sequences=tuple(scheduled))
        self._totals.steps += 1
        self._in_flight = plan
        self._in_flight_ids = frozenset(entry.sequence_id for entry in scheduled)
        return plan

    def commit(self, result: StepResult) -> None:
        """Take in what the step in flight gave.

        Raises ValueError, and changes nothing, if the result is not one of that step; then
        `fail_step` must follow.
        """
        plan = self._checked_plan(result)
        self._land()
        for entry in plan.sequences:
            sequence = self._live.get(entry.sequence_id)
            if sequence is None:
                continue  # ended during the step: its token is nobody's
            reason = result.failed.get(entry.sequence_id)
            if reason is not None:
                self._fail(sequence, StepFailedError(reason))
                continue
            self._computed(sequence, entry.end)
            if sequence.status is SequenceStatus.PREFILLING:
                self._commit_chunk(sequence, entry, result)
            else:
                self._accept(sequence, result.token_ids[entry.sequence_id])
        self._admit()

    def fail_step(self, error: WorkerError) -> None:
        """The step in flight broke: every sequence in it ends with error, the others go on."""
        plan = self._in_flight
        assert plan is not None, "fail_step() called while no step is in flight"
        self._land()
        for entry in plan.sequences:
            sequence = self._live.get(entry.sequence_id)
            if sequence is not None:
                self._fail(sequence, error)
        self._admit()

    # -- the parts ------------------------------------------------------------------------------

    def _refuse_impossible(self, spec: SequenceSpec, now: float) -> None:
        prompt, max_tokens = len(spec.prompt_token_ids), spec.sampling.max_tokens
        taken = (self._live, self._until_fence, self._in_flight_ids)
        if any(spec.sequence_id in ids for ids in taken):
            raise ValueError(f"sequence {spec.sequence_id} exists already")
        if prompt < 1 or max_tokens < 1:
            raise ValueError(
                f"a sequence needs a prompt and output: {prompt} prompt tokens, "
                f"max tokens {max_tokens}"
            )
        if prompt + max_tokens > self._config.max_model_len:
            raise ContextOverflowError(
                f"the window is {self._config.max_model_len} tokens; the prompt has {prompt} "
                f"and max tokens is {max_tokens}, together {prompt + max_tokens}"
            )
        if spec.deadline is not None and spec.deadline <= now:
            raise DeadlineExceededError("the deadline had passed when the request arrived")

    def _admit(self) -> None:
        """Serve the queue's head while there is room for it; nobody overtakes it."""
        while (head := self._queue.head) is not None:
            if not self._try_admit(self._live[head.sequence_id], head.num_blocks):
                return
            self._queue.pop()

    def _try_admit(self, sequence: Sequence, num_blocks: int) -> bool:
        if self._num_active >= self._config.max_sequences:
            return False
        block_ids = self._pool.reserve(num_blocks)
        if block_ids is None:
            return False
        sequence.block_ids = block_ids
        sequence.admission = self._admissions
        self._admissions += 1
        self._num_active += 1
        if sequence.spec.mode is SequenceMode.AWAIT_KV:
            sequence.move_to(SequenceStatus.AWAITING_KV)
        else:
            self._start_prefill(sequence)
        self._events.append(Admitted(sequence_id=sequence.sequence_id, block_ids=block_ids))
        return True

    def _start_prefill(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceStatus.PREFILLING)
        insort(self._prefilling, sequence, key=_BY_ADMISSION)

    def _checked_plan(self, result: StepResult) -> StepPlan:
        plan = self._in_flight
        if plan is None or plan.step_id != result.step_id:
            flying = "none" if plan is None else plan.step_id
            raise ValueError(f"result of step {result.step_id}, in flight is {flying}")
        missing = [
            entry.sequence_id
            for entry in plan.sequences
            if entry.sampling is not None
            and entry.sequence_id not in result.token_ids
            and entry.sequence_id not in result.failed
        ]
        if missing:
            raise ValueError(f"step {result.step_id} gave no token for sequences {missing}")
        return plan

    def _land(self) -> None:
        """The step is over: nothing writes to the blocks of what ended during it any more."""
        self._in_flight = None
        self._in_flight_ids = frozenset()
        for block_ids in self._until_commit.values():
            self._pool.release(block_ids)
        self._until_commit.clear()

    def _computed(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's first num_computed tokens have KV now."""
        sequence.num_computed = num_computed
        num_used = self._pool.blocks_for(num_computed)
        if num_used > sequence.num_used_blocks:
            self._pool.mark_used(sequence.block_ids[sequence.num_used_blocks : num_used])
            sequence.num_used_blocks = num_used

    def _commit_chunk(
        self, sequence: Sequence, entry: ScheduledSequence, result: StepResult
    ) -> None:
        """A prompt chunk is computed; after the last one the first token is there too."""
        self._totals.prompt_tokens += len(entry.token_ids)
        is_kept = sequence.spec.mode is SequenceMode.PREFILL_ONLY
        if is_kept:
            self._events.append(
                ChunkComputed(
                    sequence_id=entry.sequence_id,
                    num_computed=entry.end,
                    block_ids=sequence.block_ids,
                )
            )
        if entry.sampling is None:
            return
        token_id = result.token_ids[entry.sequence_id]
        self._prefilling.remove(sequence)
        if is_kept:
            self._hold(sequence, token_id)
        else:
            sequence.move_to(SequenceStatus.DECODING)
            self._decoding[entry.sequence_id] = sequence
            self._accept(sequence, token_id)

    def _hold(self, sequence: Sequence, first_token: int) -> None:
        """Keep a computed prompt's blocks for a reader; it takes no part in steps any more."""
        sequence.move_to(SequenceStatus.HELD)
        self._num_active -= 1
        self._totals.output_tokens += 1
        self._events.append(
            PromptComputed(sequence_id=sequence.sequence_id, first_token=first_token)
        )

    def _accept(self, sequence: Sequence, token_id: int) -> None:
        """One more output token: pass it on, and see whether it was the last."""
        sequence.token_ids.append(token_id)
        self._totals.output_tokens += 1
        sampling = sequence.spec.sampling
        if token_id in sampling.stop_token_ids:
            self._finish(sequence, FinishReason.STOP)
            return
        self._events.append(
            TokensSampled(sequence_id=sequence.spec.sequence_id, token_ids=(token_id,))
        )
        if sequence.num_output_tokens >= sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        finished = SequenceFinished(
            sequence_id=sequence.sequence_id,
            reason=reason,
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=sequence.num_output_tokens,
        )
        self._end(sequence, SequenceStatus.FINISHED, finished)

    def _fail(self, sequence: Sequence, error: WorkerError) -> None:
        failed = SequenceFailed(sequence_id=sequence.sequence_id, error=error)
        self._end(sequence, SequenceStatus.FAILED, failed)

    def _end(self, sequence: Sequence, status: SequenceStatus, event: TerminalEvent) -> None:
        """The one way out for every sequence; admits nobody, so that callers can loop."""
        before = sequence.status
        sequence.move_to(status)
        del self._live[sequence.sequence_id]
        self._leave(sequence, before)
        self._give_back(sequence, before)
        self._count_end(status)
        self._events.append(event)

    def _leave(self, sequence: Sequence, before: SequenceStatus) -> None:
        """Take the sequence out of the collection that its state put it in."""
        match before:
            case SequenceStatus.WAITING:
                self._queue.remove(sequence.sequence_id)
            case SequenceStatus.PREFILLING:
                self._prefilling.remove(sequence)
            case SequenceStatus.DECODING:
                del self._decoding[sequence.sequence_id]
            case _:
                pass
        if before not in (SequenceStatus.WAITING, SequenceStatus.HELD):
            self._num_active -= 1

    def _give_back(self, sequence: Sequence, before: SequenceStatus) -> None:
        """Free the blocks as soon as nobody can write to them."""
        sequence_id, block_ids = sequence.sequence_id, sequence.block_ids
        if before in _WITH_TRANSFER:
            if before is SequenceStatus.AWAITING_KV:
                self._pool.quarantine(block_ids)
            self._until_fence[sequence_id] = block_ids
        elif sequence_id in self._in_flight_ids:
            self._until_commit[sequence_id] = block_ids
        elif block_ids:
            self._pool.release(block_ids)

    def _count_end(self, status: SequenceStatus) -> None:
        match status:
            case SequenceStatus.FINISHED:
                self._totals.finished += 1
            case SequenceStatus.ABORTED:
                self._totals.aborted += 1
            case _:
                self._totals.failed += 1

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError, with the invariant's id, if the state contradicts itself."""
        self._pool.check_invariants()
        self._queue.check_invariants()
        self._check_ownership()
        for sequence in self._live.values():
            self._check_sequence(sequence)
        active = sum(
            sequence.status not in (SequenceStatus.WAITING, SequenceStatus.HELD)
            for sequence in self._live.values()
        )
        assert active == self._num_active <= self._config.max_sequences, (
            f"INV-ADMIT: {active} sequences are active, {self._num_active} were counted, "
            f"the limit is {self._config.max_sequences}"
        )
        head = self._queue.head
        assert (
            head is None
            or active == self._config.max_sequences
            or head.num_blocks > self._pool.num_free
        ), f"INV-ADMIT: sequence {head.sequence_id} waits although there is room"

    def _check_ownership(self) -> None:
        """Every taken block has exactly one owner."""
        owned: list[BlockId] = []
        for sequence in self._live.values():
            owned.extend(sequence.block_ids)
        for block_ids in (*self._until_commit.values(), *self._until_fence.values()):
            owned.extend(block_ids)
        taken = self._pool.num_blocks - self._pool.num_free
        assert len(owned) == len(set(owned)) == taken, (
            f"INV-CONSERVE: {taken} blocks are taken, {len(set(owned))} have an owner, "
            f"{len(owned) - len(set(owned))} have two"
        )
        unsafe = [
            block_id
            for block_ids in self._until_fence.values()
            for block_id in block_ids
            if self._pool.state(block_id) is not BlockState.QUARANTINED
        ]
        assert not unsafe, f"INV-FENCE: blocks {unsafe} left quarantine before the fence"

    def _check_sequence(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            assert not sequence.block_ids, "INV-ADMIT: a waiting sequence holds blocks"
            return
        needed = self._pool.blocks_for(sequence.spec.num_reserved_tokens)
        assert len(sequence.block_ids) == needed, (
            f"INV-ADMIT: sequence {sequence.sequence_id} holds {len(sequence.block_ids)} blocks, "
            f"reserved were {needed}"
        )
        num_used = self._pool.blocks_for(sequence.num_computed)
        rest = (
            BlockState.QUARANTINED
            if sequence.status is SequenceStatus.QUARANTINED
            else BlockState.RESERVED
        )
        for index, block_id in enumerate(sequence.block_ids):
            expected = BlockState.USED if index < num_used else rest
            assert self._pool.state(block_id) is expected, (
                f"INV-CONSERVE: block {block_id} of a {sequence.status.value} sequence is "
                f"{self._pool.state(block_id).name.lower()}, expected {expected.name.lower()}"
            )


def _decode_row(sequence: Sequence) -> ScheduledSequence:
    """The last token goes in, the next one comes out."""
    return ScheduledSequence(
        sequence_id=sequence.spec.sequence_id,
        token_ids=(sequence.token_ids[-1],),
        start=sequence.num_computed,
        block_ids=sequence.block_ids,
        sampling=sequence.spec.sampling,
        num_output_tokens=sequence.num_output_tokens,
    )


def _prompt_chunk(sequence: Sequence, max_tokens: int) -> ScheduledSequence:
    """The next tokens of a prompt; the chunk that ends it samples."""
    start = sequence.num_computed
    end = min(start + max_tokens, sequence.num_prompt_tokens)
    return ScheduledSequence(
        sequence_id=sequence.spec.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_ids=sequence.block_ids,
        sampling=sequence.spec.sampling if end == sequence.num_prompt_tokens else None,
    )
