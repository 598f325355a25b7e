"""Every live sequence of an engine, where it stands, and the one way in and out.

The roster owns the sequences and the ticket queue for the scheduler, which alone calls it. It
decides who is admitted; `Holdings` does what follows for blocks. It knows nothing of what a step
computes.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from workers.engine.events import Admitted, Event, TerminalEvent
from workers.engine.holdings import Holdings
from workers.engine.sequence import Sequence, SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId
from workers.engine.ticket_queue import Ticket, TicketQueue

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

    def __init__(self, holdings: Holdings, queue: TicketQueue, *, max_sequences: int) -> None:
        self.holdings = holdings
        self.queue = queue
        self.live: dict[SequenceId, Sequence] = {}
        self.decoding: dict[SequenceId, Sequence] = {}
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.endings = Endings()
        self._max_sequences = max_sequences
        self._num_active = 0
        self._num_admitted = 0
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Add to what `take_events` gives."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """What happened since the call before, in order."""
        events, self._events = self._events, []
        return events

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed here, as far as is known."""
        waiting = (self.live[ticket.sequence_id] for ticket in self.queue)
        return sum(
            sequence.num_prompt_tokens - sequence.num_computed
            for sequence in (*self.prefilling, *waiting)
            if sequence.spec.mode is not SequenceMode.AWAIT_KV
            or sequence.status is SequenceStatus.PREFILLING
        )

    # -- in -------------------------------------------------------------------------------------

    def knows(self, sequence_id: SequenceId) -> bool:
        """Whether the id is in use, if only for blocks that are not free yet."""
        return sequence_id in self.live or self.holdings.remembers(sequence_id)

    def add(self, spec: SequenceSpec, now: float) -> None:
        """Admit a sequence or let it wait; raises `QueueFullError` and keeps nothing of it."""
        sequence = Sequence.from_spec(spec)
        self.holdings.sharing.open_chain(sequence)
        if len(self.queue) > 0 or not self._try_admit(sequence):
            self.queue.push(
                Ticket(
                    sequence_id=spec.sequence_id,
                    num_blocks=self.holdings.num_blocks(sequence),
                    enqueued_at=now,
                    priority=spec.priority,
                )
            )
        self.live[spec.sequence_id] = sequence
        self.admit()  # it may have become the head, and need less than the head before it

    def admit(self) -> None:
        """Serve the queue's head while there is room for it; nobody overtakes it."""
        while (head := self.queue.head) is not None:
            if not self._try_admit(self.live[head.sequence_id]):
                return
            self.queue.pop()

    def _try_admit(self, sequence: Sequence) -> bool:
        if self._num_active >= self._max_sequences or not self.holdings.take(sequence):
            return False
        sequence.admission = self._num_admitted
        self._num_admitted += 1
        self._num_active += 1
        if sequence.spec.mode is SequenceMode.AWAIT_KV:
            sequence.move_to(SequenceStatus.AWAITING_KV)
        else:
            self.start_prefill(sequence)
        self.emit(
            Admitted(
                sequence_id=sequence.sequence_id,
                block_tables=sequence.block_tables,
                num_hit_tokens=sequence.num_hit_tokens,
            )
        )
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

    def quarantine(self, sequence: Sequence) -> None:
        """The transfer into the sequence's blocks failed, and may still write to them."""
        sequence.move_to(SequenceStatus.QUARANTINED)
        self.holdings.quarantine(sequence)

    def fence(self, sequence_id: SequenceId) -> None:
        """No transfer writes to the sequence's blocks any more; no effect if none was feared."""
        self.holdings.fence(sequence_id)
        sequence = self.live.get(sequence_id)
        if sequence is not None and sequence.status is SequenceStatus.QUARANTINED:
            sequence.move_to(SequenceStatus.AWAITING_KV)
            self.holdings.unquarantine(sequence)

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
        self.holdings.give_back(sequence, before)
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
        self.queue.check_invariants()
        self.holdings.check_invariants(self.live.values())
        for sequence in self.live.values():
            self._check_collection(sequence)
        self._check_admission()

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

    def _check_admission(self) -> None:
        active = sum(sequence.status not in _INACTIVE for sequence in self.live.values())
        assert active == self._num_active <= self._max_sequences, (
            f"INV-ADMIT: {active} sequences are active, {self._num_active} were counted, "
            f"the limit is {self._max_sequences}"
        )
        head = self.queue.head
        if head is not None and active < self._max_sequences:
            assert not self.holdings.has_room(self.live[head.sequence_id]), (
                f"INV-ADMIT: sequence {head.sequence_id} waits although there is room"
            )
