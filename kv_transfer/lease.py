"""The owner's record of who may read which blocks, and until when.

A lease is a duration on the owner's clock: it starts when the transfer is opened and again with
each renewal; a grant extends what may be read, never how long. The table decides and remembers; it
frees no block, sends nothing and reads no clock.

One record per transfer id, that of its highest epoch: an attempt with a lower one is superseded,
and whatever still arrives for it is told so. A record outlives its lease for a while, so that a
late or repeated message gets the answer that belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from kv_transfer.geometry import BlockId, LogicalBlock, group_and_index, logical_block
from kv_transfer.handoff import (
    FirstToken,
    Grant,
    GrantedBlock,
    ReleaseReason,
    TransferKey,
    Verdict,
)
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
)


class LeaseState(Enum):
    """Where a transfer stands on the owner's side."""

    GRANTING = "granting"
    """Live; more grants will come."""
    GRANTED = "granted"
    """Live; the last grant was made."""
    CONFIRMED = "confirmed"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    PEER_LOST = "peer_lost"


class LeaseEvent(Enum):
    """What can happen to a lease."""

    GRANT = "grant"
    GRANT_LAST = "grant_last"
    RENEW = "renew"
    CONFIRM = "confirm"
    """The receiver asked, and every granted block was untouched."""
    RELEASE = "release"
    EXPIRE = "expire"
    REVOKE = "revoke"
    LOSE_PEER = "lose_peer"


_ENDINGS: Mapping[LeaseEvent, LeaseState] = MappingProxyType(
    {
        LeaseEvent.RELEASE: LeaseState.RELEASED,
        LeaseEvent.EXPIRE: LeaseState.EXPIRED,
        LeaseEvent.REVOKE: LeaseState.REVOKED,
        LeaseEvent.LOSE_PEER: LeaseState.PEER_LOST,
    }
)

TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = MappingProxyType(
    {
        LeaseState.GRANTING: {
            LeaseEvent.GRANT: LeaseState.GRANTING,
            LeaseEvent.GRANT_LAST: LeaseState.GRANTED,
            LeaseEvent.RENEW: LeaseState.GRANTING,
            **_ENDINGS,
        },
        LeaseState.GRANTED: {
            LeaseEvent.RENEW: LeaseState.GRANTED,
            LeaseEvent.CONFIRM: LeaseState.CONFIRMED,
            **_ENDINGS,
        },
        LeaseState.CONFIRMED: {},
        LeaseState.RELEASED: {},
        LeaseState.EXPIRED: {},
        LeaseState.REVOKED: {},
        LeaseState.PEER_LOST: {},
    }
)

ENDED: Mapping[LeaseState, ReleaseReason] = MappingProxyType(
    {
        LeaseState.CONFIRMED: ReleaseReason.CONFIRMED,
        LeaseState.RELEASED: ReleaseReason.RELEASED,
        LeaseState.EXPIRED: ReleaseReason.EXPIRED,
        LeaseState.REVOKED: ReleaseReason.REVOKED,
        LeaseState.PEER_LOST: ReleaseReason.PEER_LOST,
    }
)
"""The terminal states and what each means for the owner's pins."""

_EVENT_OF_REASON: Mapping[ReleaseReason, LeaseEvent] = MappingProxyType(
    {
        ReleaseReason.RELEASED: LeaseEvent.RELEASE,
        ReleaseReason.EXPIRED: LeaseEvent.EXPIRE,
        ReleaseReason.REVOKED: LeaseEvent.REVOKE,
        ReleaseReason.PEER_LOST: LeaseEvent.LOSE_PEER,
    }
)


@dataclass(slots=True)
class _Record:
    key: TransferKey
    expires_at: float
    first_blocks: tuple[int, ...]
    state: LeaseState = LeaseState.GRANTING
    has_session: bool = False
    grants: list[Grant] = field(default_factory=list)
    granted: dict[LogicalBlock, GrantedBlock] = field(default_factory=dict)
    ended_at: float = 0.0
    why: str = ""


class LeaseTable:
    """Every transfer of one prefill process, live or ended not long ago."""

    def __init__(
        self,
        *,
        incarnation: str,
        generation_of: Callable[[BlockId], int],
        lease_s: float,
        remember_s: float = 60.0,
        max_remembered: int = 4096,
    ) -> None:
        """Judge transfers of the process `incarnation`, whose pool answers `generation_of`.

        Ended transfers are remembered for `remember_s`, at most `max_remembered` of them.
        """
        if lease_s <= 0:
            raise ValueError(f"lease_s {lease_s} must be positive")
        self._incarnation = incarnation
        self._generation_of = generation_of
        self._lease_s = lease_s
        self._remember_s = remember_s
        self._max_remembered = max_remembered
        self._live: dict[str, _Record] = {}
        self._ended: dict[str, _Record] = {}  # in the order in which they ended
        self._unreported: list[tuple[TransferKey, ReleaseReason]] = []

    @property
    def num_live(self) -> int:
        """Transfers whose blocks are pinned."""
        return len(self._live)

    def live_keys(self) -> tuple[TransferKey, ...]:
        """The transfers whose blocks are pinned."""
        return tuple(record.key for record in self._live.values())

    def check_new(self, key: TransferKey) -> None:
        """Refuse an attempt that cannot be opened: `LinkRefusedError`.

        It is for another process' incarnation, or its epoch is not above every one seen for this
        transfer id.
        """
        self._check_incarnation(key)
        seen = self._record(key.transfer_id)
        if seen is not None and key.epoch <= seen.key.epoch:
            raise LinkRefusedError(
                f"epoch {key.epoch} of transfer {key.transfer_id} is not above {seen.key.epoch}"
            )

    def open(self, key: TransferKey, now: float, *, first_blocks: tuple[int, ...] = (0,)) -> None:
        """Start the lease of a new attempt; an older attempt of the same transfer is revoked.

        In each group, blocks before the index in `first_blocks` are never granted: the receiver
        has them already, or nobody sees them any more.
        Raises `LinkRefusedError` as `check_new` does.
        """
        self.check_new(key)
        seen = self._record(key.transfer_id)
        if seen is not None:
            self._expire_if_due(seen, now)
            if seen.state not in ENDED:
                self._end(seen, LeaseEvent.REVOKE, now, f"superseded by epoch {key.epoch}")
            self._ended.pop(key.transfer_id, None)  # it may be forgotten at once where none is kept
        self._live[key.transfer_id] = _Record(
            key=key, expires_at=now + self._lease_s, first_blocks=first_blocks
        )

    def attach(self, key: TransferKey, now: float) -> None:
        """Note that a receiver has connected; a transfer has one session in its life.

        Raises `LinkRefusedError` or `LeaseLostError`.
        """
        record = self._live_record(key, now)
        if record.has_session:
            raise LinkRefusedError(f"transfer {key.transfer_id} already has a session")
        record.has_session = True

    def extend(
        self,
        key: TransferKey,
        blocks: Sequence[GrantedBlock],
        first: FirstToken | None,
        now: float,
        *,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Grant finished blocks; `first` marks the last grant. False if the transfer has ended.

        Raises ValueError for a block granted twice, a last grant that leaves a hole, or a grant
        after the last: all of them mistakes of the owner.
        """
        record = self._find(key)
        self._expire_if_due(record, now)
        if record.state in ENDED:
            return False
        granted = {block.logical: block for block in blocks}
        if len(granted) < len(blocks) or granted.keys() & record.granted.keys():
            raise ValueError(f"a logical block of transfer {key.transfer_id} is granted twice")
        if first is not None:
            _check_no_hole(record.granted.keys() | granted.keys(), record.first_blocks)
        event = LeaseEvent.GRANT if first is None else LeaseEvent.GRANT_LAST
        self._apply(record, event)
        record.granted |= granted
        record.grants.append(
            Grant(
                sequence_number=len(record.grants),
                blocks=tuple(blocks),
                first=first,
                prompt_logprobs=tuple(prompt_logprobs),
            )
        )
        return True

    def grants_from(self, key: TransferKey, index: int, now: float) -> tuple[Grant, ...]:
        """Grants made so far, from sequence number `index` on.

        Raises `LinkRefusedError`, or `LeaseLostError` once the transfer has ended.
        """
        return tuple(self._live_record(key, now).grants[index:])

    def authorize(self, key: TransferKey, blocks: Sequence[GrantedBlock], now: float) -> None:
        """Every block must be in a grant of a live lease, word for word, and untouched since.

        Raises `LinkRefusedError`, `LeaseLostError`, `CorruptTransferError` (asked for what was
        not granted) or `InvalidTransferError` (the block was freed meanwhile).
        """
        record = self._live_record(key, now)
        for block in blocks:
            if record.granted.get(block.logical) != block:
                raise CorruptTransferError(
                    f"logical block {block.logical} as block {block.block_id} generation "
                    f"{block.generation} is not granted to transfer {key.transfer_id}"
                )
            if not self._is_untouched(block):
                raise InvalidTransferError(
                    f"block {block.block_id} is no longer generation {block.generation}"
                )

    def renew(self, key: TransferKey, now: float) -> None:
        """Start the lease anew; raises `LeaseLostError` once it has expired or ended."""
        record = self._live_record(key, now)
        self._apply(record, LeaseEvent.RENEW)
        record.expires_at = now + self._lease_s

    def confirm(self, key: TransferKey, now: float) -> Verdict:
        """Whether all that was granted is untouched until now; ends the transfer either way.

        A repeated question gets the answer that was given. Raises `LinkRefusedError` for a
        transfer that this table does not know.
        """
        record = self._find(key)
        self._expire_if_due(record, now)
        if record.state in ENDED:
            confirmed = record.state is LeaseState.CONFIRMED
            return Verdict.VALID if confirmed else Verdict.INVALID
        untouched = all(self._is_untouched(block) for block in record.granted.values())
        if record.state is LeaseState.GRANTED and untouched:
            self._end(record, LeaseEvent.CONFIRM, now, "confirmed")
            return Verdict.VALID
        self._end(record, LeaseEvent.REVOKE, now, "confirm found it incomplete or overwritten")
        return Verdict.INVALID

    def release(
        self, key: TransferKey, reason: ReleaseReason, now: float, why: str = ""
    ) -> ReleaseReason | None:
        """End the transfer for `reason` (any but CONFIRMED), if it has not ended yet.

        Returns why its pins ended: the first reason wins. None if the table does not know the
        transfer, or knows a later epoch of it.
        """
        event = _EVENT_OF_REASON.get(reason)
        if event is None:
            raise ValueError("only confirm may end a transfer as confirmed")
        record = self._record(key.transfer_id)
        if record is None or record.key != key:
            return None
        self._expire_if_due(record, now)
        if record.state not in ENDED:
            self._end(record, event, now, why or reason.value)
        return ENDED[record.state]

    def revoke(self, key: TransferKey, why: str, now: float) -> ReleaseReason | None:
        """The owner takes the blocks back; as `release`, with `why` told to the receiver."""
        return self.release(key, ReleaseReason.REVOKED, now, why)

    def sweep(self, now: float) -> tuple[TransferKey, ...]:
        """Expire every lease that is due and forget what ended long ago; returns the expired.

        Looks at all records each time: leases are renewed out of order, so the first live one
        says nothing about those behind it.
        """
        due = [record for record in self._live.values() if now >= record.expires_at]
        for record in due:
            self._expire_if_due(record, now)
        forgotten = [
            transfer_id
            for transfer_id, record in self._ended.items()
            if now >= record.ended_at + self._remember_s
        ]
        for transfer_id in forgotten:
            del self._ended[transfer_id]
        return tuple(record.key for record in due)

    def take_ended(self) -> tuple[tuple[TransferKey, ReleaseReason], ...]:
        """Transfers that ended since the last call, each exactly once."""
        ended = tuple(self._unreported)
        self._unreported.clear()
        return ended

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert not self._live.keys() & self._ended.keys(), "a transfer id has two records"
        assert len(self._ended) <= self._max_remembered, "memory of ended transfers is unbounded"
        for record in self._live.values():
            assert record.state not in ENDED, "an ended transfer is still live"
            numbers = [grant.sequence_number for grant in record.grants]
            assert numbers == list(range(len(numbers))), "grants are not numbered 0, 1, 2 ..."
            granted = [block.logical for grant in record.grants for block in grant.blocks]
            assert sorted(granted) == sorted(record.granted), "granted blocks differ from grants"
        for record in self._ended.values():
            assert record.state in ENDED, "a live transfer is among the ended"
            assert not record.granted, "an ended transfer still grants blocks"

    def _record(self, transfer_id: str) -> _Record | None:
        return self._live.get(transfer_id) or self._ended.get(transfer_id)

    def _check_incarnation(self, key: TransferKey) -> None:
        if key.prefill_incarnation != self._incarnation:
            raise LinkRefusedError(
                f"transfer {key.transfer_id} is meant for incarnation {key.prefill_incarnation}, "
                f"this process is {self._incarnation}"
            )

    def _find(self, key: TransferKey) -> _Record:
        """The record of exactly this attempt, or `LinkRefusedError` that says what there is."""
        self._check_incarnation(key)
        record = self._record(key.transfer_id)
        if record is None:
            raise LinkRefusedError(f"transfer {key.transfer_id} is unknown, or ended long ago")
        if record.key.epoch != key.epoch:
            raise LinkRefusedError(
                f"transfer {key.transfer_id} is at epoch {record.key.epoch}, not {key.epoch}"
            )
        if record.key.decode_incarnation != key.decode_incarnation:
            raise LinkRefusedError(
                f"transfer {key.transfer_id} belongs to incarnation "
                f"{record.key.decode_incarnation}, not {key.decode_incarnation}"
            )
        return record

    def _live_record(self, key: TransferKey, now: float) -> _Record:
        record = self._find(key)
        self._expire_if_due(record, now)
        if record.state in ENDED:
            raise LeaseLostError(
                f"lease of transfer {key.transfer_id} ended: {record.state.value} ({record.why})"
            )
        return record

    def _is_untouched(self, block: GrantedBlock) -> bool:
        return self._generation_of(block.block_id) == block.generation

    def _expire_if_due(self, record: _Record, now: float) -> None:
        if record.state not in ENDED and now >= record.expires_at:
            self._end(record, LeaseEvent.EXPIRE, now, f"not renewed for {self._lease_s} s")

    def _apply(self, record: _Record, event: LeaseEvent) -> None:
        following = TRANSITIONS[record.state].get(event)
        if following is None:
            raise ValueError(
                f"transfer {record.key.transfer_id}: {event.value} while {record.state.value}"
            )
        record.state = following

    def _end(self, record: _Record, event: LeaseEvent, now: float, why: str) -> None:
        self._apply(record, event)
        record.ended_at, record.why = now, why
        record.grants, record.granted = [], {}
        del self._live[record.key.transfer_id]
        self._ended[record.key.transfer_id] = record
        while len(self._ended) > self._max_remembered:
            del self._ended[next(iter(self._ended))]
        self._unreported.append((record.key, ENDED[record.state]))


def _check_no_hole(logical_blocks: set[LogicalBlock], first_blocks: tuple[int, ...]) -> None:
    """Every group is granted from its first block to the same end."""
    end = 1 + max((group_and_index(logical)[1] for logical in logical_blocks), default=-1)
    expected = {
        logical_block(group, index)
        for group, first in enumerate(first_blocks)
        for index in range(first, end)
    }
    if logical_blocks != expected:
        raise ValueError(f"the last grant leaves a hole: granted are {sorted(logical_blocks)}")
