"""The receiver's state machine of one transfer: events in, actions out, no I/O.

It answers two questions: may decode use these blocks (only PUBLISHED says yes, and the only way
there is full coverage, then VALID), and may the pool use them for something else (only FREE, after
the transport's fence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kv_transfer.coverage import Coverage
from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, Grant, GrantedBlock, Verdict
from kv_transfer.logprobs import TokenLogprobs
from kv_transfer.transport import CorruptTransferError


class TransferState(Enum):
    """Where a transfer stands on the receiver's side."""

    RESERVED = "reserved"
    """Destination blocks are set aside; nothing was asked for."""
    QUEUED = "queued"
    """A session is being opened."""
    ACTIVE = "active"
    """Grants come, blocks land."""
    LANDED = "landed"
    """Every expected block landed and the last grant came; the owner is being asked."""
    CONFIRMED = "confirmed"
    """The owner said VALID."""
    PUBLISHED = "published"
    """Decode may compute with the blocks."""
    DRAINING = "draining"
    """It failed; bytes may still land."""
    QUIESCED = "quiesced"
    """It failed; no byte lands any more."""
    FREE = "free"
    """The destination blocks are the pool's again."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The caller wants the transfer to start."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is open."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The owner extended its grant."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class BlockLanded:
    """A block's bytes are in place and verified."""

    block: GrantedBlock


@dataclass(frozen=True, slots=True)
class Answered:
    """The owner answered the confirm."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Publish:
    """The caller hands the blocks to decode."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Anything went wrong, or the caller gave up."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The transport's fence has passed."""


@dataclass(frozen=True, slots=True)
class Recycle:
    """The pool takes the destination blocks back."""


Event = Begin | Opened | Granted | BlockLanded | Answered | Publish | Fail | Fenced | Recycle


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a session."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read these blocks into their places."""

    blocks: tuple[GrantedBlock, ...]
    placement: Mapping[LogicalBlock, BlockId]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Ask the owner whether the blocks are still what was granted."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the session and wait for its fence."""


Action = Connect | Fetch | Confirm | Close

TRANSITIONS: Mapping[TransferState, Mapping[type[Event], frozenset[TransferState]]] = (
    MappingProxyType(
        {
            TransferState.RESERVED: {
                Begin: frozenset({TransferState.QUEUED}),
                Fail: frozenset({TransferState.DRAINING}),
            },
            TransferState.QUEUED: {
                Opened: frozenset({TransferState.ACTIVE}),
                Fail: frozenset({TransferState.DRAINING}),
            },
            TransferState.ACTIVE: {
                Granted: frozenset({TransferState.ACTIVE, TransferState.LANDED}),
                BlockLanded: frozenset({TransferState.ACTIVE, TransferState.LANDED}),
                Fail: frozenset({TransferState.DRAINING}),
            },
            TransferState.LANDED: {
                # Never accepted, nothing is missing any more; but it is the peer's mistake.
                Granted: frozenset({TransferState.LANDED}),
                BlockLanded: frozenset({TransferState.LANDED}),
                Answered: frozenset({TransferState.CONFIRMED, TransferState.DRAINING}),
                Fail: frozenset({TransferState.DRAINING}),
            },
            TransferState.CONFIRMED: {
                Publish: frozenset({TransferState.PUBLISHED}),
                Fail: frozenset({TransferState.DRAINING}),
            },
            TransferState.PUBLISHED: {},
            TransferState.DRAINING: {Fenced: frozenset({TransferState.QUIESCED})},
            TransferState.QUIESCED: {Recycle: frozenset({TransferState.FREE})},
            TransferState.FREE: {},
        }
    )
)
"""Which states each event may lead to; an event without an entry is illegal there."""


_ACTIONS: Mapping[type[Event], Action] = MappingProxyType({Begin: Connect(), Fail: Close()})
"""What an event asks of the caller, where that does not depend on what it carries."""


class IllegalEventError(Exception):
    """Our own code sent an event that the state does not allow; nothing was changed."""


class ReceiverProtocol:
    """Decides, for one transfer, what to do next and what its blocks may be used for."""

    def __init__(
        self,
        *,
        num_tokens: int,
        block_size: int,
        placement: Sequence[BlockId],
        first_blocks: tuple[int, ...] = (0,),
    ) -> None:
        """Expect `num_tokens` tokens, in each group from the block in `first_blocks` on.

        The i-th expected block, group by group, goes into `placement[i]`. The placement may be
        longer (blocks for output tokens), never shorter. Raises ValueError.
        """
        self._coverage = Coverage(
            num_tokens=num_tokens, block_size=block_size, first_blocks=first_blocks
        )
        expected = self._coverage.expected_blocks
        if len(placement) < expected:
            raise ValueError(f"placement of {len(placement)} blocks for {expected} needed")
        if len(set(placement)) < len(placement):
            raise ValueError("a block appears twice in the placement")
        self._placement = dict(zip(self._coverage.expected, placement, strict=False))
        self._granted: dict[LogicalBlock, GrantedBlock] = {}
        self._num_grants = 0
        self._first: FirstToken | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._state = TransferState.RESERVED

    @property
    def state(self) -> TransferState:
        """Where the transfer stands."""
        return self._state

    @property
    def first(self) -> FirstToken | None:
        """What came with the last grant; None before it."""
        return self._first

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """What came with all grants so far, in order."""
        return tuple(self._prompt_logprobs)

    @property
    def blocks_landed(self) -> int:
        """Blocks whose bytes are in place."""
        return self._coverage.blocks_landed

    def apply(self, event: Event) -> Action | None:
        """Take one event; returns what the caller must do for it, if anything.

        Raises `IllegalEventError` (our mistake) or `CorruptTransferError` (the peer's); the state
        is then as before, and the caller sends `Fail`.
        """
        allowed = TRANSITIONS[self._state].get(type(event))
        if allowed is None:
            raise IllegalEventError(f"{type(event).__name__} while {self._state.value}")
        following, action = self._decide(event, allowed)
        assert following in allowed, f"{type(event).__name__}: {self._state} to {following}"
        self._state = following
        return action

    def allows(self, event: type[Event]) -> bool:
        """Whether an event of this type is legal now."""
        return event in TRANSITIONS[self._state]

    def check_invariants(self) -> None:
        """Assert INV-COVER and that what landed was granted."""
        self._coverage.check_invariants()
        assert self._coverage.blocks_landed <= len(self._granted), "landed without a grant"
        if self._state in (
            TransferState.LANDED,
            TransferState.CONFIRMED,
            TransferState.PUBLISHED,
        ):
            assert self._is_complete, "INV-COVER: past ACTIVE without full coverage"

    @property
    def _is_complete(self) -> bool:
        return self._first is not None and self._coverage.is_full

    def _decide(
        self, event: Event, allowed: frozenset[TransferState]
    ) -> tuple[TransferState, Action | None]:
        match event:
            case Granted(grant=grant):
                return self._take_grant(grant)
            case BlockLanded(block=block):
                return self._take_block(block)
            case Answered(verdict=Verdict.VALID):
                return TransferState.CONFIRMED, None
            case Answered():
                return TransferState.DRAINING, Close()
            case _:
                (following,) = allowed
                return following, _ACTIONS.get(type(event))

    def _take_grant(self, grant: Grant) -> tuple[TransferState, Action | None]:
        self._check_grant(grant)
        self._num_grants += 1
        self._granted |= {block.logical: block for block in grant.blocks}
        self._first = grant.first
        self._prompt_logprobs += grant.prompt_logprobs
        if grant.blocks:
            places = {block.logical: self._placement[block.logical] for block in grant.blocks}
            return TransferState.ACTIVE, Fetch(grant.blocks, places)
        return self._landed_if_complete()

    def _check_grant(self, grant: Grant) -> None:
        if self._first is not None:
            raise CorruptTransferError("a grant came after the last one")
        if grant.sequence_number != self._num_grants:
            raise CorruptTransferError(
                f"grant {grant.sequence_number} came where {self._num_grants} was due"
            )
        logical_blocks = {block.logical for block in grant.blocks}
        if len(logical_blocks) < len(grant.blocks) or logical_blocks & self._granted.keys():
            raise CorruptTransferError(f"grant {grant.sequence_number} repeats a logical block")
        for block in grant.blocks:
            self._coverage.check(block)
        granted = len(self._granted) + len(grant.blocks)
        if grant.is_last and granted < self._coverage.expected_blocks:
            raise CorruptTransferError(
                f"the last grant makes {granted} of {self._coverage.expected_blocks} blocks"
            )

    def _take_block(self, block: GrantedBlock) -> tuple[TransferState, Action | None]:
        if self._granted.get(block.logical) != block:
            raise CorruptTransferError(f"logical block {block.logical} landed but is not granted")
        self._coverage.mark(block)
        return self._landed_if_complete()

    def _landed_if_complete(self) -> tuple[TransferState, Action | None]:
        if self._is_complete:
            return TransferState.LANDED, Confirm()
        return TransferState.ACTIVE, None
