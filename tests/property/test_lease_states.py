"""The lease table against a model that keeps the whole history and judges by it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, GrantedBlock, ReleaseReason, TransferKey, Verdict
from kv_transfer.lease import LeaseTable
from kv_transfer.transport import LeaseLostError, LinkRefusedError, TransferError
from tests.fakes.block_memory import transfer_key
from tests.fakes.clock import FakeClock

LEASE_S = 5.0
NUM_BLOCKS = 6


@dataclass
class History:
    """What happened to one transfer id's newest attempt."""

    key: TransferKey
    held_since: list[float]
    """When the lease was opened and renewed."""
    granted: list[GrantedBlock] = field(default_factory=list)
    is_complete: bool = False
    ended: ReleaseReason | None = None

    def ends(self, now: float) -> bool:
        """Note an expiry that has happened by `now`; whether the transfer has ended."""
        if self.ended is None and now >= self.held_since[-1] + LEASE_S:
            self.ended = ReleaseReason.EXPIRED
        return self.ended is not None


class LeaseMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.clock = FakeClock()
        self.generations = [0] * NUM_BLOCKS
        self.table = LeaseTable(
            incarnation="p-1",
            generation_of=lambda block_id: self.generations[block_id],
            lease_s=LEASE_S,
            remember_s=1e9,
        )
        self.histories: dict[str, History] = {}
        self.reported: list[tuple[TransferKey, ReleaseReason]] = []
        self.expected_ends: list[tuple[TransferKey, ReleaseReason | None]] = []

    ids = st.sampled_from("abc")
    epochs = st.integers(0, 3)

    def newest(self, transfer_id: str, epoch: int) -> History | None:
        """The history of exactly this attempt."""
        history = self.histories.get(transfer_id)
        return history if history is not None and history.key.epoch == epoch else None

    def end(self, history: History, reason: ReleaseReason) -> None:
        """The attempt ends now, unless it had expired by now."""
        if not history.ends(self.clock()):
            history.ended = reason

    def live(self, transfer_id: str, epoch: int) -> History | None:
        history = self.newest(transfer_id, epoch)
        return None if history is None or history.ends(self.clock()) else history

    @rule(transfer_id=ids, epoch=epochs)
    def open(self, transfer_id, epoch):
        key = transfer_key(transfer_id, epoch)
        history = self.histories.get(transfer_id)
        try:
            self.table.open(key, self.clock())
        except LinkRefusedError:
            assert history is not None
            assert epoch <= history.key.epoch
            return
        assert history is None or epoch > history.key.epoch
        if history is not None:
            self.end(history, ReleaseReason.REVOKED)
            self.expected_ends.append((history.key, history.ended))
        self.histories[transfer_id] = History(key=key, held_since=[self.clock()])

    @rule(transfer_id=ids, epoch=epochs, count=st.integers(0, 2), is_last=st.booleans())
    def grant(self, transfer_id, epoch, count, is_last):
        key = transfer_key(transfer_id, epoch)
        history = self.newest(transfer_id, epoch)
        start = len(history.granted) if history is not None else 0
        blocks = [
            GrantedBlock(
                logical=LogicalBlock(i),
                block_id=BlockId(i),
                generation=self.generations[i],
                valid_tokens=4,
            )
            for i in range(start, min(start + count, NUM_BLOCKS))
        ]
        first = FirstToken(token_id=1) if is_last else None
        try:
            is_live = self.table.extend(key, blocks, first, self.clock())
        except LinkRefusedError:
            assert history is None
        except ValueError:
            assert history is not None
            assert history.is_complete
        else:
            assert history is not None
            assert is_live == (self.live(transfer_id, epoch) is not None)
            if is_live:
                assert not history.is_complete
                history.granted += blocks
                history.is_complete = is_last

    @rule(transfer_id=ids, epoch=epochs)
    def renew(self, transfer_id, epoch):
        history = self.live(transfer_id, epoch)
        try:
            self.table.renew(transfer_key(transfer_id, epoch), self.clock())
        except LeaseLostError:
            assert history is None
            assert self.newest(transfer_id, epoch) is not None
        except LinkRefusedError:
            assert self.newest(transfer_id, epoch) is None
        else:
            assert history is not None
            history.held_since.append(self.clock())

    @rule(transfer_id=ids, epoch=epochs)
    def confirm(self, transfer_id, epoch):
        history = self.newest(transfer_id, epoch)
        try:
            verdict = self.table.confirm(transfer_key(transfer_id, epoch), self.clock())
        except LinkRefusedError:
            assert history is None
            return
        assert history is not None
        if history.ends(self.clock()):
            assert (verdict is Verdict.VALID) == (history.ended is ReleaseReason.CONFIRMED)
            return
        untouched = all(self.generations[b.block_id] == b.generation for b in history.granted)
        valid = history.is_complete and untouched
        assert (verdict is Verdict.VALID) == valid
        history.ended = ReleaseReason.CONFIRMED if valid else ReleaseReason.REVOKED

    @rule(
        transfer_id=ids,
        epoch=epochs,
        reason=st.sampled_from(
            [ReleaseReason.RELEASED, ReleaseReason.PEER_LOST, ReleaseReason.REVOKED]
        ),
    )
    def release(self, transfer_id, epoch, reason):
        history = self.newest(transfer_id, epoch)
        answer = self.table.release(transfer_key(transfer_id, epoch), reason, self.clock())
        if history is not None:
            self.end(history, reason)
        assert answer == (history.ended if history is not None else None)

    @rule(transfer_id=ids, epoch=epochs)
    def authorize(self, transfer_id, epoch):
        history = self.live(transfer_id, epoch)
        known = self.newest(transfer_id, epoch)
        blocks = tuple(known.granted) if known is not None else ()
        allowed = history is not None and all(
            self.generations[b.block_id] == b.generation for b in blocks
        )
        try:
            self.table.authorize(transfer_key(transfer_id, epoch), blocks, self.clock())
        except TransferError:
            assert not allowed
        else:
            assert allowed

    @precondition(lambda self: self.histories)
    @rule(
        data=st.data(),
        count=st.integers(1, 2),
        then=st.sampled_from(["grant", "grant last", "renew", "authorize", "confirm"]),
    )
    def go_on_with_the_newest(self, data, count, then):
        """Without this, hardly any transfer would get as far as its confirm."""
        transfer_id = data.draw(st.sampled_from(sorted(self.histories)))
        epoch = self.histories[transfer_id].key.epoch
        match then:
            case "grant" | "grant last":
                self.grant(transfer_id, epoch, count, then == "grant last")
            case "renew":
                self.renew(transfer_id, epoch)
            case "authorize":
                self.authorize(transfer_id, epoch)
            case "confirm":
                self.confirm(transfer_id, epoch)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def free_block(self, block_id):
        self.generations[block_id] += 1

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 4.5, 5.0, 7.0]))
    def advance(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def sweep(self):
        before = {key.transfer_id for key in self.table.live_keys()}
        expired = self.table.sweep(self.clock())
        for history in self.histories.values():
            if history.key.transfer_id in before:
                assert (history.key in expired) == history.ends(self.clock())
        live = {h.key for h in self.histories.values() if not h.ends(self.clock())}
        assert set(self.table.live_keys()) == live

    @precondition(lambda self: self.histories)
    @rule()
    def collect(self):
        self.table.sweep(self.clock())
        self.reported += self.table.take_ended()
        ended = [(h.key, h.ended) for h in self.histories.values() if h.ends(self.clock())]
        assert sorted(self.reported, key=repr) == sorted([*ended, *self.expected_ends], key=repr)

    @invariant()
    def holds(self):
        self.table.check_invariants()


LeaseMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLeases = LeaseMachine.TestCase
