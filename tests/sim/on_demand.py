"""The scheduler that Baton's is compared with: blocks when they are needed, preemption when short.

As in vLLM's engine: a request is admitted when its prompt fits and a watermark stays free; a block
is taken when a sequence grows into it; when there is none, the youngest sequence gives all of its
own back and later computes its prompt and its output so far anew. What a step computes is chosen as
Baton's scheduler chooses it (decodes first, then prompt chunks by admission, the same limits), so
that nothing differs but when blocks are taken. For simulations only.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool
from workers.engine.block_table import BlockTable
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceSpec
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan, StepResult

__all__ = ["OnDemandScheduler"]

WATERMARK = 0.01
"""Of the pool; stays free at admission, so that those admitted before can grow a little."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    spec: SequenceSpec
    arrival: int
    token_ids: list[int]
    """Prompt, then output."""
    block_ids: list[BlockId] = field(default_factory=list)
    num_used_blocks: int = 0
    num_computed: int = 0
    num_output: int = 0

    @property
    def num_uncomputed(self) -> int:
        """1 for a sequence that decodes: its newest token."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token has no KV; after a preemption, everything has none."""
        return self.num_output > 0 and self.num_uncomputed == 1


class OnDemandScheduler:
    """Sequences in, step plans out; as much of `Scheduler`'s surface as a simulation needs."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens that had KV when their sequence was preempted."""
        self._config = config
        self._watermark = int(pool.num_blocks * WATERMARK)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        """In the order of admission, the youngest last."""
        self._in_flight: StepPlan | None = None
        self._arrivals = 0
        self._steps = 0

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._waiting) + len(self._running)

    def submit(self, spec: SequenceSpec, now: float) -> None:
        """Let a sequence wait until it fits."""
        token_ids = list(spec.prompt_token_ids)
        self._waiting.append(_Sequence(spec=spec, arrival=self._arrivals, token_ids=token_ids))
        self._arrivals += 1

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing is live."""
        assert self._in_flight is None
        scheduled = self._decode_rows()
        self._admit()
        budget = self._config.step_tokens - len(scheduled)
        for sequence in self._running:
            if budget == 0:
                break
            if not sequence.is_decoding:
                chunk = _rows(sequence, min(budget, self._config.prefill_chunk_tokens))
                scheduled.append(chunk)
                budget -= len(chunk.token_ids)
        if not scheduled:
            return None
        self._in_flight = StepPlan(step_id=self._steps, sequences=tuple(scheduled))
        self._steps += 1
        return self._in_flight

    def commit(self, result: StepResult) -> None:
        """Take in what the step in flight gave."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None
        by_id = {sequence.spec.sequence_id: sequence for sequence in self._running}
        for entry in plan.sequences:
            sequence = by_id[entry.sequence_id]
            self._computed(sequence, entry.end)
            if entry.sampling is not None:
                self._accept(sequence, result.token_ids[entry.sequence_id])

    def check_invariants(self) -> None:
        """Every taken block is one sequence's, which needs it now; nobody waits with blocks."""
        self.pool.check_invariants()
        owned = [block_id for sequence in self._running for block_id in sequence.block_ids]
        assert len(owned) == len(set(owned)) == self.pool.num_blocks - self.pool.num_available
        assert not any(sequence.block_ids for sequence in self._waiting)
        for sequence in self._running:
            assert len(sequence.block_ids) == self.pool.blocks_for(len(sequence.token_ids)) or (
                sequence.is_decoding  # grows only when its step is planned
                and len(sequence.block_ids) == self.pool.blocks_for(sequence.num_computed)
            )

    # -- blocks ---------------------------------------------------------------------------------

    def _decode_rows(self) -> list[ScheduledSequence]:
        """A row for every decoding sequence that has, or gets, a block for it; oldest first."""
        return [
            _rows(sequence, 1)
            for sequence in list(self._running)
            # Without blocks: preempted by an older one a moment ago.
            if sequence.block_ids and sequence.is_decoding and self._grow(sequence)
        ]

    def _grow(self, sequence: _Sequence) -> bool:
        """Blocks for all tokens, if need be of younger sequences; False if it lost its own.

        Sequences grow oldest first, so that a victim never has a row in this step already.
        """
        needed = self.pool.blocks_for(len(sequence.token_ids)) - len(sequence.block_ids)
        if needed == 0:
            return True
        while (block_ids := self.pool.reserve(needed)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids.extend(block_ids)
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self.preemptions += 1
        self.recomputed_tokens += sequence.num_computed
        self._give_back(sequence)
        sequence.num_computed = 0
        # Before everybody who came later, as it was before.
        insort(self._waiting, sequence, key=attrgetter("arrival"))

    def _give_back(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_used_blocks = 0
        self._running.remove(sequence)

    def _admit(self) -> None:
        """In order of arrival, while the head's known tokens fit above the watermark."""
        while self._waiting and len(self._running) < self._config.max_sequences:
            sequence = self._waiting[0]
            needed = self.pool.blocks_for(len(sequence.token_ids))
            spare = self._watermark if self._running else 0
            if needed + spare > self.pool.num_available:
                return
            block_ids = self.pool.reserve(needed)
            assert block_ids is not None
            sequence.block_ids = list(block_ids)
            self._running.append(self._waiting.popleft())

    # -- tokens ---------------------------------------------------------------------------------

    def _computed(self, sequence: _Sequence, num_computed: int) -> None:
        sequence.num_computed = num_computed
        num_used = self.pool.blocks_for(num_computed)
        self.pool.mark_used(sequence.block_ids[sequence.num_used_blocks : num_used])
        sequence.num_used_blocks = num_used

    def _accept(self, sequence: _Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        sequence.num_output += 1
        sampling = sequence.spec.sampling
        if token_id in sampling.stop_token_ids or sequence.num_output >= sampling.max_tokens:
            self._give_back(sequence)


def _rows(sequence: _Sequence, max_tokens: int) -> ScheduledSequence:
    """The next tokens without KV; the chunk that reaches the newest token samples."""
    start = sequence.num_computed
    end = min(start + max_tokens, len(sequence.token_ids))
    return ScheduledSequence(
        sequence_id=SequenceId(sequence.spec.sequence_id),
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_tables=(BlockTable(block_ids=tuple(sequence.block_ids)),),
        sampling=sequence.spec.sampling if end == len(sequence.token_ids) else None,
        num_output_tokens=sequence.num_output,
    )
