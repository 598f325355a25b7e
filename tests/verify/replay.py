"""Does to the real classes what a walk did to the model.

One method per event of the model, of the same name; `seen` says in the model's words what state
the classes are in. The network, the two processes and the clock are played here: what is sent,
lost or late is the walk's to say, and only what the classes really said can be delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, GrantedBlock, ReleaseReason, TransferKey, Verdict
from kv_transfer.lease import LeaseTable
from kv_transfer.protocol import (
    Answered,
    Begin,
    BlockLanded,
    Close,
    Confirm,
    Connect,
    Fail,
    Fenced,
    Fetch,
    Granted,
    Opened,
    Publish,
    ReceiverProtocol,
    Recycle,
    TransferState,
)
from kv_transfer.transport import LeaseLostError, LinkRefusedError
from tests.fakes.block_memory import transfer_key
from tests.verify.walks import Step
from workers.engine.block_pool import BlockPool, BlockState
from workers.engine.block_table import ONE_FULL_GROUP
from workers.engine.events import SequenceAborted
from workers.engine.holdings import Holdings
from workers.engine.roster import Roster
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import Sequence, SequenceMode, SequenceSpec, SequenceStatus
from workers.engine.step import SequenceId
from workers.engine.ticket_queue import TicketQueue

BLOCK_SIZE = 4
PROMPTS = (5, 2)
"""Prompt tokens of the two requests: two blocks and one."""
MAX_TOKENS = (3, 2)
"""They fit into the prompt's last block, so that each request needs no more."""
LEASE_S = 5.0

FAILED_PULL = frozenset(
    {TransferState.DRAINING, TransferState.QUIESCED, TransferState.PUBLISHED, TransferState.FREE}
)
"""Where the model has forgotten what landed."""


class Engine:
    """A worker's sequences and blocks, without the steps that compute them."""

    def __init__(self) -> None:
        pool = BlockPool(num_blocks=2, block_size=BLOCK_SIZE, max_model_len=2 * BLOCK_SIZE)
        self.holdings = Holdings(pool, None, groups=(ONE_FULL_GROUP,), chunk_tokens=BLOCK_SIZE)
        queue = TicketQueue(limit=0, aging_s=1.0)
        self.roster = Roster(self.holdings, queue, max_sequences=2)
        self._num_added = 0

    def add(self, request: int, mode: SequenceMode) -> Sequence:
        """Admit a sequence for a request; there is room."""
        self._num_added += 1
        spec = SequenceSpec(
            sequence_id=SequenceId(self._num_added),
            prompt_token_ids=tuple(range(PROMPTS[request])),
            sampling=SamplingParams(max_tokens=MAX_TOKENS[request]),
            mode=mode,
        )
        self.roster.add(spec, now=0.0)
        return self.roster.live[spec.sequence_id]

    def end(self, sequence: Sequence, status: SequenceStatus) -> None:
        """The one way out, whatever the reason."""
        self.roster.end(sequence, status, SequenceAborted(sequence_id=sequence.sequence_id))

    def blocks(self) -> list[str]:
        """The states of all blocks in the model's words, in no order that means anything."""
        counts = self.holdings.pool.counts()
        assert counts.cached == 0
        return sorted(
            f"B_{state.name}"
            for state in BlockState
            for _ in range(getattr(counts, state.name.lower()))
        )


@dataclass(slots=True, kw_only=True)
class DecodeRequest:
    """A request as the decode worker has it."""

    status: SequenceStatus = SequenceStatus.WAITING
    """As long as there is no sequence."""
    sequence: Sequence | None = None
    pull: ReceiverProtocol | None = None
    key: TransferKey | None = None
    epoch: int = 0
    fetched: dict[LogicalBlock, GrantedBlock] = field(default_factory=dict)
    num_taken: int = 0

    @property
    def name(self) -> str:
        """The model's word for its status."""
        status = self.status if self.sequence is None else self.sequence.status
        return f"S_{status.name}"

    def drop_pull(self) -> None:
        """The transfer is over for the worker."""
        self.pull, self.key, self.fetched, self.num_taken = None, None, {}, 0


@dataclass(slots=True, kw_only=True)
class PrefillJob:
    """A request as the prefill worker has it."""

    key: TransferKey
    status: SequenceStatus = SequenceStatus.WAITING
    """As long as there is no sequence."""
    sequence: Sequence | None = None
    reason: ReleaseReason | None = None
    """Why its lease ended, as the table reported it."""

    @property
    def name(self) -> str:
        """The model's word for its status."""
        status = self.status if self.sequence is None else self.sequence.status
        return f"S_{status.name}"


class Replay:
    """Both workers, and all that is between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.d_crashes = 0
        self.incarnation = 0
        self.decode = Engine()
        self.requests = [DecodeRequest(), DecodeRequest()]
        self.keys: dict[tuple[int, int, int], TransferKey] = {}
        self.said: set[tuple[Verdict, int, int, int]] = set()
        self._start_prefill()

    def take(self, step: Step) -> None:
        """One event."""
        getattr(self, step.event.lower())(*step.numbers)
        for key, reason in self.table.take_ended():
            job = self.jobs[int(key.transfer_id)]
            if job is not None and job.key == key:
                assert job.reason is None, "a lease ends once"
                job.reason = reason
        self._check_invariants()

    def seen(self) -> dict[str, object]:
        """The classes' state, in the model's words."""
        state: dict[str, object] = {"incarnation": str(self.incarnation)}
        for r, request in enumerate(self.requests):
            state[f"d_seq{r}"] = request.name
            state[f"pull{r}"] = f"T_{request.pull.state.name}" if request.pull else "0"
            state[f"landed_by{r}"] = self._num_landed(request)
            job = self.jobs[r]
            state[f"p_seq{r}"] = job.name if job else "0"
            state[f"lease{r}"], state[f"granted{r}"] = self._lease(job)
        state["d_blocks"] = self.decode.blocks()
        state["p_blocks"] = self.prefill.blocks()
        return state

    # -- the decode worker's loop -----------------------------------------------------------------

    def e_admit(self, r: int) -> None:
        self.requests[r].sequence = self.decode.add(r, SequenceMode.AWAIT_KV)

    def e_open(self, r: int) -> None:
        request = self.requests[r]
        request.epoch += 1
        request.key = self._open_lease(r, request.epoch)
        request.pull = ReceiverProtocol(
            num_tokens=PROMPTS[r],
            block_size=BLOCK_SIZE,
            placement=self._sequence(r).block_ids,
        )

    def e_open_unheard(self, r: int) -> None:
        self.requests[r].epoch += 1
        self._open_lease(r, self.requests[r].epoch)

    def e_prefill_here(self, r: int) -> None:
        self.decode.holdings.start_over(self._sequence(r))
        self.decode.roster.start_prefill(self._sequence(r))

    def e_computed_here(self, r: int) -> None:
        self.decode.holdings.computed(self._sequence(r), PROMPTS[r])
        self.decode.roster.start_decoding(self._sequence(r))

    def e_quarantine(self, r: int) -> None:
        self.decode.roster.quarantine(self._sequence(r))

    def e_fence(self, r: int) -> None:
        self._recycle(r)
        self.decode.roster.fence(self._sequence(r).sequence_id)

    def e_fence_ended(self, r: int) -> None:
        if self.requests[r].pull is not None and self._pull(r).state is TransferState.QUIESCED:
            self._recycle(r)
        self.requests[r].drop_pull()
        self.decode.roster.fence(self._sequence(r).sequence_id)

    def e_publish(self, r: int) -> None:
        self._pull(r).apply(Publish())
        self.requests[r].drop_pull()
        self.decode.roster.start_decoding(self._sequence(r))
        self.decode.holdings.landed(self._sequence(r), ())

    def e_publish_ended(self, r: int) -> None:
        self._pull(r).apply(Publish())

    def e_finish(self, r: int) -> None:
        self.decode.end(self._sequence(r), SequenceStatus.FINISHED)

    def e_abort(self, r: int) -> None:
        request = self.requests[r]
        if request.sequence is None:
            request.status = SequenceStatus.ABORTED
        else:
            self.decode.end(request.sequence, SequenceStatus.ABORTED)

    def e_d_crash(self, _: int) -> None:
        self.d_crashes += 1
        self.decode = Engine()
        for request in self.requests:
            request.drop_pull()
            if request.sequence is not None:
                is_over = request.name in _ENDED
                request.status = request.sequence.status if is_over else SequenceStatus.WAITING
                request.sequence = None

    # -- the decode worker's transfer thread ------------------------------------------------------

    def e_begin(self, r: int) -> None:
        assert isinstance(self._pull(r).apply(Begin()), Connect)

    def e_opened(self, r: int) -> None:
        self.table.attach(self._key(r), self.now)
        self._pull(r).apply(Opened())

    def e_granted(self, r: int) -> None:
        request = self.requests[r]
        grant = self.table.grants_from(self._key(r), request.num_taken, self.now)[0]
        fetch = self._pull(r).apply(Granted(grant))
        assert isinstance(fetch, Fetch)
        for block in fetch.blocks:
            assert fetch.placement[block.logical] == self._sequence(r).block_ids[block.logical]
            request.fetched[block.logical] = block
        request.num_taken += 1

    def e_landed(self, i: int) -> None:
        r, logical = _owner(i)
        if self._pull(r).state is TransferState.ACTIVE:
            action = self._pull(r).apply(BlockLanded(self.requests[r].fetched[logical]))
            assert isinstance(action, Confirm) == (self._pull(r).state is TransferState.LANDED)

    def e_broken(self, i: int) -> None:
        self.e_fail(_owner(i)[0])

    def e_dropped(self, i: int) -> None:
        assert self._pull(_owner(i)[0]).state is TransferState.DRAINING

    def e_valid(self, r: int, epoch: int, incarnation: int) -> None:
        self._answer(r, epoch, incarnation, Verdict.VALID)

    def e_invalid(self, r: int, epoch: int, incarnation: int) -> None:
        self._answer(r, epoch, incarnation, Verdict.INVALID)

    def e_fail(self, r: int) -> None:
        assert isinstance(self._pull(r).apply(Fail()), Close)

    def e_fenced(self, r: int) -> None:
        self._pull(r).apply(Fenced())

    def e_renew(self, r: int) -> None:
        self.table.renew(self._key(r), self.now)

    def e_renew_late(self, r: int) -> None:
        with pytest.raises(LeaseLostError):
            self.table.renew(self._key(r), self.now)
        self.e_fail(r)

    def e_confirm_again(self, r: int) -> None:
        assert self._pull(r).state is TransferState.LANDED

    def e_lost(self, _: int) -> None:
        """What was on its way is not: nobody knows."""

    # -- the prefill worker -----------------------------------------------------------------------

    def e_p_admit(self, r: int) -> None:
        self._job(r).sequence = self.prefill.add(r, SequenceMode.PREFILL_ONLY)

    def e_p_compute(self, r: int) -> None:
        job = self._job(r)
        assert job.sequence is not None
        logical = job.sequence.num_used_blocks
        num_computed = min(PROMPTS[r], (logical + 1) * BLOCK_SIZE)
        self.prefill.holdings.computed(job.sequence, num_computed)
        is_last = num_computed == PROMPTS[r]
        if is_last:
            self.prefill.roster.hold(job.sequence)
        block_id = job.sequence.block_ids[logical]
        block = GrantedBlock(
            logical=LogicalBlock(logical),
            block_id=block_id,
            generation=self._generation_of(block_id),
            valid_tokens=num_computed - logical * BLOCK_SIZE,
        )
        first = FirstToken(token_id=7) if is_last else None
        is_live = self.table.extend(job.key, (block,), first, self.now)
        assert is_live == (job.reason is None)

    def e_confirm(self, r: int, epoch: int, incarnation: int) -> None:
        try:
            verdict = self.table.confirm(self.keys[r, epoch, incarnation], self.now)
        except LinkRefusedError:
            return
        self.said.add((verdict, r, epoch, incarnation))

    def e_release(self, r: int, epoch: int, incarnation: int) -> None:
        key = self.keys[r, epoch, incarnation]
        self.table.release(key, ReleaseReason.RELEASED, self.now)

    def e_p_end(self, r: int) -> None:
        job = self._job(r)
        assert job.reason is not None, "blocks are freed only after the lease has ended"
        is_served = job.reason in (ReleaseReason.CONFIRMED, ReleaseReason.RELEASED)
        self._end_job(job, is_served=is_served)

    def e_revoke(self, r: int) -> None:
        self.table.revoke(self._job(r).key, "its sequence failed", self.now)

    def e_expire(self, r: int) -> None:
        """The lease of one request is over, while that of the other one was renewed in time."""
        self.now += LEASE_S / 2
        for key in self.table.live_keys():
            if int(key.transfer_id) != r:
                self.table.renew(key, self.now)
        self.now += LEASE_S / 2
        assert self.table.sweep(self.now) == (self._job(r).key,)

    def e_p_fail(self, r: int) -> None:
        job = self._job(r)
        if job.sequence is None:
            job.status = SequenceStatus.FAILED
        else:
            self.prefill.end(job.sequence, SequenceStatus.FAILED)

    def e_peer_lost(self, r: int) -> None:
        self.table.release(self._job(r).key, ReleaseReason.PEER_LOST, self.now)

    def e_reopen(self, r: int) -> None:
        self._open_lease(r, self.requests[r].epoch)

    def e_p_crash(self, _: int) -> None:
        self.incarnation += 1
        self._start_prefill()

    # -- the parts --------------------------------------------------------------------------------

    def _start_prefill(self) -> None:
        self.prefill = Engine()
        self.jobs: list[PrefillJob | None] = [None, None]
        self.table = LeaseTable(
            incarnation=f"p-{self.incarnation}",
            generation_of=self._generation_of,
            lease_s=LEASE_S,
            remember_s=1e9,
        )

    def _generation_of(self, block_id: BlockId) -> int:
        return self.prefill.holdings.pool.generations[block_id]

    def _open_lease(self, r: int, epoch: int) -> TransferKey:
        """PrefillWorker._open, and what the end of an older attempt sets free."""
        key = transfer_key(
            str(r), epoch, prefill=f"p-{self.incarnation}", decode=f"d-{self.d_crashes}"
        )
        self.keys[r, epoch, self.incarnation] = key
        self.table.open(key, self.now)
        older = self.jobs[r]
        if older is not None:
            self._end_job(older, is_served=False)
        self.jobs[r] = PrefillJob(key=key)
        return key

    def _end_job(self, job: PrefillJob, *, is_served: bool) -> None:
        """PrefillWorker.on_transfer_end."""
        if job.name in _ENDED:
            return
        is_held = job.name == "S_HELD"
        status = SequenceStatus.FINISHED if is_served and is_held else SequenceStatus.ABORTED
        if job.sequence is None:
            job.status = status
        else:
            self.prefill.end(job.sequence, status)

    def _answer(self, r: int, epoch: int, incarnation: int, verdict: Verdict) -> None:
        """An answer arrives; a session takes only those to its own attempt."""
        assert (verdict, r, epoch, incarnation) in self.said, "nobody has said so"
        request = self.requests[r]
        is_mine = request.key == self.keys[r, epoch, incarnation]
        if is_mine and self._pull(r).state is TransferState.LANDED:
            self._pull(r).apply(Answered(verdict))

    def _recycle(self, r: int) -> None:
        self._pull(r).apply(Recycle())
        assert self._pull(r).state is TransferState.FREE
        self.requests[r].drop_pull()

    def _lease(self, job: PrefillJob | None) -> tuple[str, str]:
        """The lease's state and how many blocks it grants."""
        if job is None:
            return "0", "0"
        if job.reason is not None:
            return f"L_{job.reason.name}", "0"
        grants = self.table.grants_from(job.key, 0, self.now)
        is_granted = bool(grants) and grants[-1].is_last
        return "L_GRANTED" if is_granted else "L_GRANTING", str(len(grants))

    def _num_landed(self, request: DecodeRequest) -> int:
        if request.pull is None or request.pull.state in FAILED_PULL:
            return 0
        return request.pull.blocks_landed

    def _check_invariants(self) -> None:
        self.decode.roster.check_invariants()
        self.prefill.roster.check_invariants()
        self.table.check_invariants()
        for request in self.requests:
            if request.pull is not None:
                request.pull.check_invariants()

    def _sequence(self, r: int) -> Sequence:
        sequence = self.requests[r].sequence
        assert sequence is not None
        return sequence

    def _pull(self, r: int) -> ReceiverProtocol:
        pull = self.requests[r].pull
        assert pull is not None
        return pull

    def _key(self, r: int) -> TransferKey:
        key = self.requests[r].key
        assert key is not None
        return key

    def _job(self, r: int) -> PrefillJob:
        job = self.jobs[r]
        assert job is not None
        return job


_ENDED = frozenset({"S_FINISHED", "S_ABORTED", "S_FAILED"})


def _owner(i: int) -> tuple[int, LogicalBlock]:
    """Whose block it is that the model numbers through, and which of theirs."""
    return i // 2, LogicalBlock(i % 2)


def expected(state: Mapping[str, str]) -> dict[str, object]:
    """A state of the model, as `Replay.seen` would say it."""
    same = {
        name: value for name, value in state.items() if "block" not in name and "landed" not in name
    }
    return same | {
        "landed_by0": int(state["landed0"]) + int(state["landed1"]),
        "landed_by1": int(state["landed2"]),
        "d_blocks": sorted((state["d_block0"], state["d_block1"])),
        "p_blocks": sorted((state["p_block0"], state["p_block1"])),
    }
