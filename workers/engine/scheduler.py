"""Decides what each step computes, and when every sequence is admitted, moved on and ended.

The scheduler never waits, never reads a clock and never touches a tensor: what happens is told
to it by method calls, what follows from it is read with `take_events`. Calls come from one
thread.

Rules that hold at every moment:
- A sequence is admitted only with all blocks that it can ever need (INV-ADMIT); from then on
  nothing takes them away, so that nobody is ever preempted for memory.
- The blocks of a sequence that has ended stay taken as long as somebody may still write to them:
  the step in flight until its commit, a transfer until its fence (INV-FENCE).
- Every sequence ends with exactly one terminal event (INV-ONE-END).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kv_transfer.geometry import KVGroup
from kv_transfer.logprobs import TokenLogprobs
from workers.engine.block_pool import BlockPool
from workers.engine.block_table import ONE_FULL_GROUP
from workers.engine.events import Event, SequenceAborted, SequenceReleased
from workers.engine.holdings import Holdings
from workers.engine.pace import FEW_TOKENS, Load, StepPace
from workers.engine.prefix_cache import PrefixScope
from workers.engine.progress import Progress
from workers.engine.roster import Roster
from workers.engine.rows import decode_row, prompt_chunk
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import (
    IllegalTransitionError,
    Sequence,
    SequenceSpec,
    SequenceStatus,
)
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult
from workers.engine.ticket_queue import TicketQueue
from workers.errors import DeadlineExceededError, StepFailedError, WorkerError

__all__ = ["Scheduler", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a scheduler has done since it was made."""

    steps: int
    prompt_tokens: int
    """Prompt tokens computed here; those that came from another worker are not counted."""
    output_tokens: int
    """Sampled here or published."""
    queried_tokens: int
    """Prompt tokens of sequences that were looked up in the prefix cache."""
    hit_tokens: int
    """Those of them that were found there."""
    stored_blocks: int
    """Blocks that the prefix cache took."""
    evicted_blocks: int
    """Blocks that the prefix cache gave up."""
    finished: int
    aborted: int
    failed: int


class Scheduler:
    """Sequences in, step plans and events out."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        scope: PrefixScope | None = None,
        *,
        groups: tuple[KVGroup, ...] = (ONE_FULL_GROUP,),
    ) -> None:
        """`scope` is what the pool's KV belongs to; without it there is no prefix cache.

        `groups` are those of the model's layers, which share the pool; it must know their windows.
        """
        self._config = config
        self._holdings = Holdings(
            pool, scope, groups=groups, chunk_tokens=config.prefill_chunk_tokens
        )
        queue = TicketQueue(limit=config.queue_limit, aging_s=config.aging_s)
        self._roster = Roster(self._holdings, queue, max_sequences=config.max_sequences)
        self._progress = Progress(self._roster)
        self._pace = StepPace()
        self._in_flight: StepPlan | None = None
        # Never later than the earliest deadline of a live sequence; may be earlier.
        self._deadline_bound = math.inf
        self._steps = 0

    # -- what can be seen -----------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        """The limits that it was made with."""
        return self._config

    @property
    def pool(self) -> BlockPool:
        """The pool; others only read it."""
        return self._holdings.pool

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._roster.queue)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._roster.live)

    @property
    def totals(self) -> Totals:
        """A snapshot of the counters."""
        endings = self._roster.endings
        return Totals(
            steps=self._steps,
            prompt_tokens=self._progress.num_prompt_tokens,
            output_tokens=self._progress.num_output_tokens,
            queried_tokens=self._holdings.sharing.num_queried_tokens,
            hit_tokens=self._holdings.sharing.num_hit_tokens,
            stored_blocks=self.pool.cache.num_stored,
            evicted_blocks=self.pool.cache.num_evicted,
            finished=endings.finished,
            aborted=endings.aborted,
            failed=endings.failed,
        )

    @property
    def pace(self) -> StepPace:
        """How fast steps are, told by who runs them: what `load` and the targets go by."""
        return self._pace

    def load(self) -> Load:
        """What a prompt that came now would meet."""
        num_streams = len(self._roster.decoding)
        return Load(
            queued_tokens=self._roster.num_queued_tokens,
            prompt_token_s=self._pace.prompt_token_s,
            num_streams=num_streams,
            streams_s=self._pace.streams_s(num_streams),
            step_tokens=max(
                1, min(self._prompt_budget(num_streams), self._config.prefill_chunk_tokens)
            ),
        )

    def status_of(self, sequence_id: SequenceId) -> SequenceStatus | None:
        """A live sequence's state; None once it has ended."""
        sequence = self._roster.live.get(sequence_id)
        return None if sequence is None else sequence.status

    def count_by_status(self) -> Mapping[SequenceStatus, int]:
        """Live sequences by state; states with none are left out."""
        return dict(Counter(sequence.status for sequence in self._roster.live.values()))

    def take_events(self) -> list[Event]:
        """What happened since the call before, in order."""
        return self._roster.take_events()

    def check_invariants(self) -> None:
        """Raise AssertionError, with the invariant's id, if the state contradicts itself."""
        self._roster.check_invariants()

    # -- sequences come and go ------------------------------------------------------------------

    def submit(self, spec: SequenceSpec, now: float) -> None:
        """Admit a sequence, or let it wait.

        Raises `ContextOverflowError` if it can never fit the window, `DeadlineExceededError` if
        it is too late already, `QueueFullError` if too many wait; nothing is kept of it then.
        """
        if self._roster.knows(spec.sequence_id):
            raise ValueError(f"sequence {spec.sequence_id} exists already")
        self._config.refuse_impossible(spec, now)
        self._roster.add(spec, now)
        if spec.deadline is not None:
            self._deadline_bound = min(self._deadline_bound, spec.deadline)

    def cancel(self, sequence_id: SequenceId) -> bool:
        """End a sequence in any state; False if it has ended already."""
        sequence = self._roster.live.get(sequence_id)
        if sequence is None:
            return False
        aborted = SequenceAborted(sequence_id=sequence_id)
        self._roster.end(sequence, SequenceStatus.ABORTED, aborted)
        self._roster.admit()
        return True

    def release(self, sequence_id: SequenceId) -> bool:
        """A HELD sequence's reader is done: free its blocks; False if it has ended already."""
        sequence = self._live_in(SequenceStatus.HELD, sequence_id)
        if sequence is None:
            return False
        released = SequenceReleased(sequence_id=sequence_id)
        self._roster.end(sequence, SequenceStatus.FINISHED, released)
        self._roster.admit()
        return True

    def fail_all(self, error: WorkerError) -> None:
        """End every sequence with an error, waiting and HELD ones included."""
        for sequence in list(self._roster.live.values()):
            self._progress.fail(sequence, error)

    # -- KV that comes from another worker ------------------------------------------------------

    def publish(
        self,
        sequence_id: SequenceId,
        first_token: int,
        logprobs: TokenLogprobs | None = None,
        *,
        first_tokens: tuple[int, ...] = (),
    ) -> bool:
        """The prompt's KV is in the blocks, proved intact: decode from first_token on.

        In each group that of the tokens from the one in `first_tokens` on; empty is of all that the
        blocks have place for. False if the sequence has ended; the caller then owes
        the fence.
        """
        sequence = self._live_in(SequenceStatus.AWAITING_KV, sequence_id)
        if sequence is None:
            return False
        self._roster.start_decoding(sequence)
        self._holdings.landed(sequence, first_tokens)
        self._progress.token_sampled(sequence, first_token, logprobs)
        self._roster.admit()
        return True

    def prefill_here(self, sequence_id: SequenceId) -> bool:
        """Compute the prompt on this worker instead; False if the sequence has ended.

        No transfer may be writing to its blocks: after a failed one, `quarantine` and `fence`.
        """
        sequence = self._live_in(SequenceStatus.AWAITING_KV, sequence_id)
        if sequence is None:
            return False
        self._holdings.start_over(sequence)
        self._roster.start_prefill(sequence)
        self._roster.admit()  # into the room that what was to arrive needed beside a hit
        return True

    def quarantine(self, sequence_id: SequenceId) -> bool:
        """The transfer into the sequence's blocks failed; False if the sequence has ended.

        `fence` must follow in either case, once the transport can write no more.
        """
        sequence = self._live_in(SequenceStatus.AWAITING_KV, sequence_id)
        if sequence is None:
            return False
        self._roster.quarantine(sequence)
        return True

    def fence(self, sequence_id: SequenceId) -> bool:
        """No transfer writes to the sequence's blocks any more; True if the sequence lives.

        A live sequence can be tried again (AWAITING_KV); an ended one's blocks are freed. Safe to
        repeat, and without effect if nothing is quarantined for the sequence.
        """
        self._roster.fence(sequence_id)
        self._roster.admit()
        return sequence_id in self._roster.live

    # -- time -----------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be called if nothing else happens before."""
        return None if self._deadline_bound == math.inf else self._deadline_bound

    def expire(self, now: float) -> None:
        """Fail every sequence whose deadline is not after now.

        HELD ones stay: the lease of their reader limits them.
        """
        if now < self._deadline_bound:
            return
        self._deadline_bound = math.inf
        for sequence in list(self._roster.live.values()):
            deadline = sequence.spec.deadline
            if deadline is None or sequence.status is SequenceStatus.HELD:
                continue
            if deadline <= now:
                self._progress.fail(sequence, _too_late(sequence))
            else:
                self._deadline_bound = min(self._deadline_bound, deadline)
        self._roster.admit()

    # -- steps ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if no sequence has anything to compute.

        Every decoding sequence gets its row first: a gap between tokens is what a reader sees.
        Prompts share what is left in the order of admission: finishing the oldest first never
        delays it for a younger one, and its finished chunks can be handed over soonest.
        `prefill_chunk_tokens` leaves younger prompts a share where step_tokens is larger.
        """
        assert self._in_flight is None, "plan() called while a step is in flight"
        self.expire(now)
        for sequence in self._roster.decoding.values():
            self._holdings.move_on(sequence)
        scheduled = [decode_row(sequence) for sequence in self._roster.decoding.values()]
        num_streams = len(scheduled)
        scheduled += self._prompt_chunks(num_streams)
        self._roster.admit()  # into what was given up just now
        if not scheduled:
            return None
        self._in_flight = StepPlan(
            step_id=self._steps, sequences=tuple(scheduled), num_streams=num_streams
        )
        self._steps += 1
        self._holdings.take_off(entry.sequence_id for entry in scheduled)
        return self._in_flight

    def _prompt_budget(self, num_streams: int) -> int:
        """Prompt tokens that a step of so many streams may compute."""
        budget = self._config.step_tokens - num_streams
        target_s = self._config.target_s(num_streams)
        if target_s is None:
            return budget
        block_size = self.pool.block_size
        fitting = self._pace.prompt_tokens_within(target_s, num_streams)
        # A block at least: a prompt that waits for streams to end might wait for ever. Where
        # nobody waits for a token, some more: in steps that are too small for their fixed part a
        # token costs more, so that still fewer would fit the next one.
        least = block_size if num_streams else max(block_size, FEW_TOKENS)
        # Whole blocks: fewer lengths of steps, and rows of products, than there are clock readings.
        return min(budget, max(fitting - fitting % block_size, least))

    def _prompt_chunks(self, num_streams: int) -> Iterator[ScheduledSequence]:
        """A chunk of each prompt in turn, up to the step's budget, scored ones up to their own."""
        room = self._config.step_tokens - num_streams
        budget, scored_budget = self._prompt_budget(num_streams), self._config.scored_tokens
        is_oldest = True
        for sequence in self._roster.prefilling:
            is_scored = sequence.spec.sampling.prompt_logprobs is not None
            limit = self._scored_cell(sequence, scored_budget) if is_scored else budget
            if is_scored and limit > min(budget, room) and not is_oldest:
                return  # a whole cell or nothing, and nobody younger in its place
            max_tokens = min(limit, room, self._config.prefill_chunk_tokens)
            if max_tokens <= 0:
                continue
            self._holdings.catch_up(sequence)
            self._holdings.move_on(sequence)
            chunk = prompt_chunk(sequence, max_tokens)
            room -= len(chunk.token_ids)
            budget -= len(chunk.token_ids)
            scored_budget -= len(chunk.token_ids) if is_scored else 0
            is_oldest = False
            yield chunk

    def _scored_cell(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a scored prompt's next chunk; 0 if others in the step leave less for it.

        Always the same cells of the prompt, whatever streams beside it: chunks of another size
        round otherwise, which is seen in log-probabilities, not in the tokens that are sampled.
        """
        computed, cell = sequence.num_computed, self._config.scored_tokens
        tokens = min(cell - computed % cell, sequence.num_prompt_tokens - computed)
        return tokens if tokens <= budget else 0

    def commit(self, result: StepResult) -> None:
        """Take in what the step in flight gave.

        Raises ValueError, and changes nothing, if the result is not one of that step; then
        `fail_step` must follow.
        """
        plan = self._checked_plan(result)
        self._land()
        for entry in plan.sequences:
            sequence = self._roster.live.get(entry.sequence_id)
            if sequence is None:
                continue  # ended during the step: its token is nobody's
            reason = result.failed.get(entry.sequence_id)
            if reason is not None:
                self._holdings.sharing.distrust(sequence, self._roster.live.values())
                self._progress.fail(sequence, StepFailedError(reason))
                continue
            self._holdings.computed(sequence, entry.end)
            if sequence.status is SequenceStatus.PREFILLING:
                self._progress.chunk_computed(sequence, entry, result)
            else:
                number = entry.sequence_id
                self._progress.token_sampled(
                    sequence, result.token_ids[number], result.logprobs.get(number)
                )
        self._roster.admit()

    def fail_step(self, error: WorkerError) -> None:
        """The step in flight broke: every sequence in it ends with error, the others go on."""
        plan = self._in_flight
        assert plan is not None, "fail_step() called while no step is in flight"
        self._land()
        for entry in plan.sequences:
            sequence = self._roster.live.get(entry.sequence_id)
            if sequence is not None:
                self._progress.fail(sequence, error)
        self._roster.admit()

    # -- the parts ------------------------------------------------------------------------------

    def _live_in(self, status: SequenceStatus, sequence_id: SequenceId) -> Sequence | None:
        """The sequence, or None if it has ended; in any other state than status it is a bug."""
        sequence = self._roster.live.get(sequence_id)
        if sequence is not None and sequence.status is not status:
            raise IllegalTransitionError(
                f"sequence {sequence_id} is {sequence.status.value}, needed {status.value}"
            )
        return sequence

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
        self._in_flight = None
        self._holdings.land()


def _too_late(sequence: Sequence) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"the deadline passed while the request was {sequence.status.value}, "
        f"after {sequence.num_output_tokens} output tokens"
    )
