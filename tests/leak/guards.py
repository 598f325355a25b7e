"""What stands between a prompt and somebody else's blocks, and for each a stand-in that says yes.

A stand-in is a patch of the running test process. There is no setting, flag or argument by which
a guard of the product could be turned off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import kv_transfer.protocol
import kv_transfer.receiver
import kv_transfer.sender
import tests.fakes.worker_rig
from kv_transfer.coverage import Coverage
from kv_transfer.handoff import Grant, GrantedBlock, TransferKey, Verdict
from kv_transfer.lease import LeaseEvent, LeaseTable
from kv_transfer.protocol import (
    Action,
    Answered,
    Confirm,
    Fetch,
    Granted,
    Publish,
    ReceiverProtocol,
    TransferState,
)
from kv_transfer.pull import Pull
from kv_transfer.transport import CorruptTransferError, FetchSession, InvalidTransferError
from kv_transfer.transports import wire
from kv_transfer.transports.wire import Header, Identity
from tests.fakes.watched_transport import WatchedPool
from workers.engine.prefix_cache import BlockKey, KeyChain, PrefixScope

Replace = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One check of the product."""

    what: str
    """As the documentation's table names it."""
    where: str
    """The file that checks."""
    seen_as: str
    """Pattern of what is logged or raised when this one refuses, and no other."""
    replace: Replace
    """Put something in its place that refuses nothing."""

    def has_refused(self, evidence: str) -> bool:
        """Whether it was this one."""
        return re.search(self.seen_as, evidence) is not None


# -- the window -----------------------------------------------------------------------------------


class _PoolOfAnySize(WatchedPool):
    def __init__(self, *, num_blocks: int, window_blocks: int, **others: Any) -> None:
        window_blocks = min(window_blocks, num_blocks)
        super().__init__(num_blocks=num_blocks, window_blocks=window_blocks, **others)


def _let_any_pool_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tests.fakes.worker_rig, "WatchedPool", _PoolOfAnySize)


def _let_prefill_pair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_transfer.sender, "check_compatible", _anybody)


def _let_decode_pair(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_transfer.receiver, "check_compatible", _anybody)


def _anybody(prefill: object, decode: object) -> None:
    """Two workers that fit each other, whoever they are."""


# -- coverage -------------------------------------------------------------------------------------


def _take_any_number_of_tokens(patch: pytest.MonkeyPatch) -> None:
    check = Coverage.check

    def stand_in(self: Coverage, block: GrantedBlock) -> None:
        try:
            check(self, block)
        except CorruptTransferError as error:
            if "tokens, needed" not in str(error):
                raise

    patch.setattr(Coverage, "check", stand_in)


def _take_a_last_grant_of_any_size(patch: pytest.MonkeyPatch) -> None:
    check = ReceiverProtocol._check_grant

    def stand_in(self: ReceiverProtocol, grant: Grant) -> None:
        try:
            check(self, grant)
        except CorruptTransferError as error:
            if "the last grant makes" not in str(error):
                raise

    patch.setattr(ReceiverProtocol, "_check_grant", stand_in)


def _call_anything_covered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "is_full", property(lambda _: True))


# -- generations, confirm, publish ----------------------------------------------------------------


def _send_any_generation(patch: pytest.MonkeyPatch) -> None:
    authorize = LeaseTable.authorize

    def stand_in(
        self: LeaseTable, key: TransferKey, blocks: tuple[GrantedBlock, ...], now: float
    ) -> None:
        try:
            authorize(self, key, blocks, now)
        except InvalidTransferError:
            return

    patch.setattr(LeaseTable, "authorize", stand_in)


def _always_say_valid(patch: pytest.MonkeyPatch) -> None:
    def stand_in(self: LeaseTable, key: TransferKey, now: float) -> Verdict:
        self._end(self._find(key), LeaseEvent.CONFIRM, now, "confirmed unseen")
        return Verdict.VALID

    patch.setattr(LeaseTable, "confirm", stand_in)


def _do_not_listen_to_the_verdict(patch: pytest.MonkeyPatch) -> None:
    async def stand_in(self: Pull, session: FetchSession) -> None:
        action: Action | None = None
        while not isinstance(action, Confirm):
            grant, self._last_grant_at = await self._arrived.get()
            action = self._protocol.apply(Granted(grant))
            if isinstance(action, Fetch):
                action = await self._fetch(session, action)
        self._protocol.apply(Answered(await session.confirm()))

    patch.setattr(Pull, "_follow", stand_in)


def _publish_from_anywhere(patch: pytest.MonkeyPatch) -> None:
    published = {Publish: frozenset({TransferState.PUBLISHED})}
    table = {
        state: {**following, **published}
        for state, following in kv_transfer.protocol.TRANSITIONS.items()
    }
    patch.setattr(kv_transfer.protocol, "TRANSITIONS", table)


def _take_any_bytes(patch: pytest.MonkeyPatch) -> None:
    check = wire.check_payload

    def stand_in(header: Header, identity: Identity, payload: memoryview | bytes) -> None:
        if header.kind not in wire.BLOCK_FRAMES:
            check(header, identity, payload)

    patch.setattr(wire, "check_payload", stand_in)


# -- the prefix cache -----------------------------------------------------------------------------


def _leave_the_salt_out(patch: pytest.MonkeyPatch) -> None:
    chain = PrefixScope.chain
    patch.setattr(PrefixScope, "chain", lambda self, _salt: chain(self, ""))


def _leave_the_tokens_out(patch: pytest.MonkeyPatch) -> None:
    def stand_in(self: KeyChain, _token_ids: object, num_blocks: int) -> None:
        for index in range(len(self.keys), num_blocks):
            self.keys.append(BlockKey(self._root[:12] + index.to_bytes(4, "little")))

    patch.setattr(KeyChain, "extend", stand_in)


# -- all of them ----------------------------------------------------------------------------------

POOL = Guard(
    what="a pool holds the window, or its worker does not start",
    where="workers/engine/block_pool.py",
    seen_as=r"INV-POOL-WINDOW: the pool holds",
    replace=_let_any_pool_start,
)
PREFILL_LINK = Guard(
    what="prefill takes no prompt where either pool is below the window",
    where="kv_transfer/sender.py",
    seen_as=r"HandoffRefusedError: .*below the window",
    replace=_let_prefill_pair,
)
DECODE_LINK = Guard(
    what="decode asks nothing of a worker whose pool is below the window",
    where="kv_transfer/receiver.py",
    seen_as=r"LinkRefusedError: .*below the window",
    replace=_let_decode_pair,
)
ADMISSION = Guard(
    what="a prompt without room is not admitted, so that nothing is granted",
    where="workers/engine/roster.py",
    seen_as=r"TransferDeadlineError: [\s\S]*granted=False",
    replace=lambda _: None,  # what stands in is the worker of the incident itself
)
VALID_TOKENS = Guard(
    what="each granted block has the tokens that the prompt has there",
    where="kv_transfer/coverage.py",
    seen_as=r"CorruptTransferError: logical block \d+ has \d+ tokens, needed",
    replace=_take_any_number_of_tokens,
)
LAST_GRANT = Guard(
    what="with the last grant every block of the prompt is granted",
    where="kv_transfer/protocol.py",
    seen_as=r"CorruptTransferError: the last grant makes",
    replace=_take_a_last_grant_of_any_size,
)
COVERAGE = Guard(
    what="nothing is confirmed before every block and token has landed",
    where="kv_transfer/coverage.py",
    seen_as=r"TransferDeadlineError: .*while active[\s\S]*granted=True",
    replace=_call_anything_covered,
)
FETCHED_GENERATION = Guard(
    what="a block that was freed since its grant is not sent",
    where="kv_transfer/lease.py",
    seen_as=r"InvalidTransferError: block \d+ is no longer generation",
    replace=_send_any_generation,
)
CONFIRM = Guard(
    what="confirm compares every generation once more, after the last byte",
    where="kv_transfer/lease.py",
    seen_as=r"InvalidTransferError: .*blocks changed while they were read",
    replace=_always_say_valid,
)
VERDICT = Guard(
    what="decode ends a transfer that is not VALID",
    where="kv_transfer/pull.py",
    seen_as=r"InvalidTransferError: .*blocks changed while they were read",
    replace=_do_not_listen_to_the_verdict,
)
PUBLISH = Guard(
    what="only what is CONFIRMED can be published",
    where="kv_transfer/protocol.py",
    seen_as=r"IllegalEventError: Publish while draining",
    replace=_publish_from_anywhere,
)
DIGEST = Guard(
    what="a block's digest, keyed by transfer and place, is that of its bytes",
    where="kv_transfer/transports/wire.py",
    seen_as=r"CorruptTransferError: \w+ digest is",
    replace=_take_any_bytes,
)
SALT = Guard(
    what="keys of the prefix cache begin with the tenant's salt",
    where="workers/engine/prefix_cache.py",
    seen_as=r"found=0",
    replace=_leave_the_salt_out,
)
TOKENS = Guard(
    what="keys of the prefix cache hold every token up to the block's end",
    where="workers/engine/prefix_cache.py",
    seen_as=r"found=0",
    replace=_leave_the_tokens_out,
)
