"""Every live sequence of an engine, the blocks that each holds, and the one way in and out.

The roster owns the sequences, the ticket queue and the pool's bookkeeping for the scheduler,
which alone calls it. It decides who is admitted and when blocks are free again; it knows nothing
of what a step computes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from kv_transfer.geometry import BlockId
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.events import Admitted, Event, TerminalEvent
from workers.engine.sequence import Sequence, SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId
from workers.engine.ticket_queue import Ticket, TicketQueue

_WITH_TRANSFER: Final = frozenset({SequenceStatus.AWAITING_KV, SequenceStatus.QUARANTINED})
"""States in which a transfer may be writing to the sequence's blocks."""

_INACTIVE: Final = frozenset({SequenceStatus.WAITING, SequenceStatus.HELD})
"""Live states that do not count against max_sequences: no step will have a row for them."""

_BY_ADMISSION: Final = attrgetter("admission")


@dataclass(slots=True, kw_only=True)
class Endings:
    """How many sequences have ended, and how."""

    finished: int = 0
    aborted: int = 0
    failed: int = 0


class Roster:
    """Admits sequences, keeps them by what they do, and gives back what ended ones held."""

    def __init__(self, pool: BlockPool, queue: TicketQueue, *, max_sequences: int) -> None:
        self.pool = pool
        self.queue = queue
        self.live: dict[SequenceId, Sequence] = {}
        self.decoding: dict[SequenceId, Sequence] = {}
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.endings = Endings()
        self._max_sequences = max_sequences
        self._num_active = 0
        self._num_admitted = 0
        self._in_step: frozenset[SequenceId] = frozenset()
        # Blocks of ended sequences that the step in flight, or a transfer, may still write to.
        self._until_commit: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._until_fence: dict[SequenceId, tuple[BlockId, ...]] = {}
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Add to what `take_events` gives."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """What happened since the call before, in order."""
        events, self._events = self._events, []
        return events

    # -- in -------------------------------------------------------------------------------------

    def knows(self, sequence_id: SequenceId) -> bool:
        """Whether the id is in use, if only for blocks that are not free yet."""
        return any(sequence_id in ids for ids in (self.live, self._until_fence, self._in_step))

    def add(self, spec: SequenceSpec, now: float) -> None:
        """Admit a sequence or let it wait; raises `QueueFullError` and keeps nothing of it."""
        sequence = Sequence.from_spec(spec)
        num_blocks = self.pool.blocks_for(spec.num_reserved_tokens)
        if len(self.queue) > 0 or not self._try_admit(sequence, num_blocks):
            self.queue.push(
                Ticket(
                    sequence_id=spec.sequence_id,
                    num_blocks=num_blocks,
                    enqueued_at=now,
                    priority=spec.priority,
                )
            )
        self.live[spec.sequence_id] = sequence
        self.admit()  # it may have become the head, and need less than the head before it

    def admit(self) -> None:
        """Serve the queue's head while there is room for it; nobody overtakes it."""
        while (head := self.queue.head) is not None:
            if not self._try_admit(self.live[head.sequence_id], head.num_blocks):
                return
            self.queue.pop()

    def _try_admit(self, sequence: Sequence, num_blocks: int) -> bool:
        if self._num_active >= self._max_sequences:
            return False
        block_ids = self.pool.reserve(num_blocks)
        if block_ids is None:
            return False
        sequence.block_ids = block_ids
        sequence.admission = self._num_admitted
        self._num_admitted += 1
        self._num_active += 1
        if sequence.spec.mode is SequenceMode.AWAIT_KV:
            sequence.move_to(SequenceStatus.AWAITING_KV)
        else:
            self.start_prefill(sequence)
        self.emit(Admitted(sequence_id=sequence.sequence_id, block_ids=block_ids))
        return True

    # -- from state to state --------------------------------------------------------------------

    def start_prefill(self, sequence: Sequence) -> None:
        """The sequence's prompt is to be computed here."""
        sequence.move_to(SequenceStatus.PREFILLING)
        # A fallback was admitted before younger prompts, and goes before them here too.
        insort(self.prefilling, sequence, key=_BY_ADMISSION)

    def start_decoding(self, sequence: Sequence) -> None:
        """The whole prompt has KV, computed here or published."""
        before = sequence.status
        sequence.move_to(SequenceStatus.DECODING)
        self._leave(sequence, before)
        self.decoding[sequence.sequence_id] = sequence

    def hold(self, sequence: Sequence) -> None:
        """The prompt is computed and kept for a reader; no step has a row for it any more."""
        sequence.move_to(SequenceStatus.HELD)
        self._leave(sequence, SequenceStatus.PREFILLING)
        self._num_active -= 1

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence's first num_computed tokens have KV now."""
        sequence.num_computed = num_computed
        num_used = self.pool.blocks_for(num_computed)
        if num_used > sequence.num_used_blocks:
            self.pool.mark_used(sequence.block_ids[sequence.num_used_blocks : num_used])
            sequence.num_used_blocks = num_used

    def quarantine(self, sequence: Sequence) -> None:
        """The transfer into the sequence's blocks failed, and may still write to them."""
        sequence.move_to(SequenceStatus.QUARANTINED)
        self.pool.quarantine(sequence.block_ids)

    def fence(self, sequence_id: SequenceId) -> None:
        """No transfer writes to the sequence's blocks any more; no effect if none was feared."""
        block_ids = self._until_fence.pop(sequence_id, None)
        if block_ids is not None:
            self.pool.unquarantine(block_ids)
            self.pool.release(block_ids)
            return
        sequence = self.live.get(sequence_id)
        if sequence is not None and sequence.status is SequenceStatus.QUARANTINED:
            sequence.move_to(SequenceStatus.AWAITING_KV)
            self.pool.unquarantine(sequence.block_ids)

    # -- steps ----------------------------------------------------------------------------------

    def take_off(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A step writes to these sequences' blocks from now on."""
        self._in_step = frozenset(sequence_ids)

    def land(self) -> None:
        """The step is over: nothing writes to the blocks of what ended during it any more."""
        self._in_step = frozenset()
        for block_ids in self._until_commit.values():
            self.pool.release(block_ids)
        self._until_commit.clear()

    # -- out ------------------------------------------------------------------------------------

    def end(self, sequence: Sequence, status: SequenceStatus, event: TerminalEvent) -> None:
        """The one way out for every sequence (INV-ONE-END).

        Admits nobody into the room that it makes: callers end several, then `admit`.
        """
        before = sequence.status
        sequence.move_to(status)
        del self.live[sequence.sequence_id]
        self._leave(sequence, before)
        self._num_active -= before not in _INACTIVE
        self._give_back(sequence, before)
        self._count(status)
        self.emit(event)

    def _leave(self, sequence: Sequence, before: SequenceStatus) -> None:
        """Take the sequence out of the collection that its state before put it in."""
        match before:
            case SequenceStatus.WAITING:
                self.queue.remove(sequence.sequence_id)
            case SequenceStatus.PREFILLING:
                self.prefilling.remove(sequence)
            case SequenceStatus.DECODING:
                del self.decoding[sequence.sequence_id]
            case _:
                pass

    def _give_back(self, sequence: Sequence, before: SequenceStatus) -> None:
        """Free the blocks as soon as nobody can write to them (INV-FENCE)."""
        sequence_id, block_ids = sequence.sequence_id, sequence.block_ids
        if before in _WITH_TRANSFER:
            if before is SequenceStatus.AWAITING_KV:
                self.pool.quarantine(block_ids)
            self._until_fence[sequence_id] = block_ids
        elif sequence_id in self._in_step:
            self._until_commit[sequence_id] = block_ids
        else:
            self.pool.release(block_ids)

    def _count(self, status: SequenceStatus) -> None:
        match status:
            case SequenceStatus.FINISHED:
                self.endings.finished += 1
            case SequenceStatus.ABORTED:
                self.endings.aborted += 1
            case _:
                self.endings.failed += 1

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError, with the invariant's id, if the state contradicts itself."""
        self.pool.check_invariants()
        self.queue.check_invariants()
        self._check_owners()
        for sequence in self.live.values():
            self._check_collection(sequence)
            self._check_blocks(sequence)
        self._check_admission()

    def _check_owners(self) -> None:
        """Every taken block has exactly one owner."""
        owned = [block_id for sequence in self.live.values() for block_id in sequence.block_ids]
        for block_ids in (*self._until_commit.values(), *self._until_fence.values()):
            owned.extend(block_ids)
        taken = self.pool.num_blocks - self.pool.num_free
        assert len(owned) == len(set(owned)) == taken, (
            f"INV-CONSERVE: {taken} blocks are taken, {len(set(owned))} have an owner, "
            f"{len(owned) - len(set(owned))} have a second one"
        )
        fenced = [block_id for ids in self._until_fence.values() for block_id in ids]
        assert self.pool.states(fenced) == _repeat(BlockState.QUARANTINED, len(fenced)), (
            "INV-FENCE: a block of an ended sequence left quarantine before the fence"
        )

    def _check_collection(self, sequence: Sequence) -> None:
        """The sequence is where its state says, and nowhere else."""
        places = (
            (SequenceStatus.DECODING, sequence.sequence_id in self.decoding),
            (SequenceStatus.PREFILLING, sequence in self.prefilling),
        )
        for status, is_there in places:
            assert is_there == (sequence.status is status), (
                f"INV-ONE-END: sequence {sequence.sequence_id} is {sequence.status.value}, "
                f"listed as {status.value}: {is_there}"
            )

    def _check_blocks(self, sequence: Sequence) -> None:
        """A sequence holds what was reserved, each block in the state that its tokens imply."""
        if sequence.status is SequenceStatus.WAITING:
            assert not sequence.block_ids, "INV-ADMIT: a waiting sequence holds blocks"
            return
        reserved = self.pool.blocks_for(sequence.spec.num_reserved_tokens)
        assert len(sequence.block_ids) == reserved, (
            f"INV-ADMIT: sequence {sequence.sequence_id} holds {len(sequence.block_ids)} blocks, "
            f"reserved were {reserved}"
        )
        is_quarantined = sequence.status is SequenceStatus.QUARANTINED
        rest = BlockState.QUARANTINED if is_quarantined else BlockState.RESERVED
        num_used = self.pool.blocks_for(sequence.num_computed)
        expected = _repeat(BlockState.USED, num_used) + _repeat(rest, reserved - num_used)
        assert self.pool.states(sequence.block_ids) == expected, (
            f"INV-CONSERVE: blocks of a {sequence.status.value} sequence with "
            f"{sequence.num_computed} computed tokens are {self.pool.states(sequence.block_ids)!r}"
        )

    def _check_admission(self) -> None:
        active = sum(sequence.status not in _INACTIVE for sequence in self.live.values())
        assert active == self._num_active <= self._max_sequences, (
            f"INV-ADMIT: {active} sequences are active, {self._num_active} were counted, "
            f"the limit is {self._max_sequences}"
        )
        head = self.queue.head
        if head is not None and active < self._max_sequences:
            assert head.num_blocks > self.pool.num_free, (
                f"INV-ADMIT: sequence {head.sequence_id} waits although there is room"
            )


def _repeat(state: BlockState, num_blocks: int) -> bytes:
    return bytes((state,)) * num_blocks
