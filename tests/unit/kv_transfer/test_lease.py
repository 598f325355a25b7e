import dataclasses

import pytest

from kv_transfer.geometry import BlockId, logical_block
from kv_transfer.handoff import FirstToken, ReleaseReason, Verdict
from kv_transfer.lease import ENDED, TRANSITIONS, LeaseEvent, LeaseState, LeaseTable
from kv_transfer.transport import (
    CorruptTransferError,
    InvalidTransferError,
    LeaseLostError,
    LinkRefusedError,
)
from tests.fakes.block_memory import granted_blocks, transfer_key

KEY = transfer_key()
FIRST = FirstToken(token_id=7)
BLOCKS = granted_blocks(20, 4, [9, 8, 7, 6, 5])


class Pool:
    def __init__(self):
        self.generations = [0] * 16

    def generation_of(self, block_id: BlockId) -> int:
        return self.generations[block_id]


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def table(pool):
    made = LeaseTable(incarnation="p-1", generation_of=pool.generation_of, lease_s=5.0)
    yield made
    made.check_invariants()


def opened(table, key=KEY, now=0.0):
    table.open(key, now)
    return table


def granted(table, key=KEY, now=0.0):
    opened(table, key, now)
    assert table.extend(key, BLOCKS, FIRST, now)
    return table


def test_every_state_has_a_row_and_only_live_states_can_change():
    assert set(TRANSITIONS) == set(LeaseState)
    assert {state for state, row in TRANSITIONS.items() if not row} == set(ENDED)


def test_confirm_within_the_lease_is_valid_and_ends_the_transfer(table):
    granted(table)
    assert table.confirm(KEY, 4.9) is Verdict.VALID
    assert table.take_ended() == ((KEY, ReleaseReason.CONFIRMED),)
    assert table.num_live == 0


def test_each_end_is_reported_once(table):
    granted(table)
    table.confirm(KEY, 1.0)
    table.release(KEY, ReleaseReason.RELEASED, 1.0)
    table.sweep(100.0)
    assert len(table.take_ended()) == 1
    assert table.take_ended() == ()


def test_a_repeated_confirm_gets_the_answer_that_was_given(table, pool):
    granted(table)
    table.confirm(KEY, 1.0)
    pool.generations[9] += 1  # freed, as the confirm allowed
    assert table.confirm(KEY, 2.0) is Verdict.VALID


def test_confirm_is_invalid_from_the_moment_of_expiry(table):
    granted(table)
    assert table.confirm(KEY, 5.0) is Verdict.INVALID
    assert table.take_ended() == ((KEY, ReleaseReason.EXPIRED),)


def test_confirm_stays_invalid_after_expiry(table):
    granted(table)
    table.sweep(6.0)
    assert table.confirm(KEY, 6.1) is Verdict.INVALID
    assert table.confirm(KEY, 6.2) is Verdict.INVALID


@pytest.mark.parametrize("block_id", [9, 7, 5])
def test_confirm_is_invalid_if_any_generation_moved(table, pool, block_id):
    granted(table)
    pool.generations[block_id] += 1
    assert table.confirm(KEY, 1.0) is Verdict.INVALID
    assert table.take_ended() == ((KEY, ReleaseReason.REVOKED),)


def test_confirm_before_the_last_grant_is_invalid(table):
    opened(table)
    table.extend(KEY, BLOCKS[:2], None, 0.0)
    assert table.confirm(KEY, 1.0) is Verdict.INVALID
    assert table.take_ended() == ((KEY, ReleaseReason.REVOKED),)


def test_a_grant_does_not_prolong_the_lease(table):
    opened(table)
    table.extend(KEY, BLOCKS, FIRST, 4.9)
    assert table.sweep(5.0) == (KEY,)


def test_a_renewal_starts_the_lease_anew(table):
    granted(table)
    table.renew(KEY, 4.0)
    assert table.sweep(8.9) == ()
    assert table.confirm(KEY, 8.9) is Verdict.VALID


def test_a_renewal_while_more_is_to_be_granted_keeps_the_transfer_open(table):
    opened(table)
    table.renew(KEY, 4.0)
    assert table.extend(KEY, BLOCKS, FIRST, 8.0)


def test_a_renewal_after_expiry_is_refused_even_before_the_sweep(table):
    granted(table)
    with pytest.raises(LeaseLostError, match="expired"):
        table.renew(KEY, 5.0)
    assert table.confirm(KEY, 5.0) is Verdict.INVALID


def test_an_expired_lease_authorises_nothing(table):
    granted(table)
    table.authorize(KEY, BLOCKS, 4.9)
    with pytest.raises(LeaseLostError):
        table.authorize(KEY, BLOCKS[:1], 5.0)


def test_liveness_can_be_asked_without_a_block(table):
    opened(table)
    table.authorize(KEY, (), 1.0)
    table.revoke(KEY, "aborted", 1.0)
    with pytest.raises(LeaseLostError, match="aborted"):
        table.authorize(KEY, (), 1.0)


def test_the_sweep_looks_behind_a_live_lease(table):
    first, second, third = (transfer_key(name) for name in "abc")
    for key in (first, second, third):
        opened(table, key)
    table.renew(first, 4.0)
    table.renew(third, 1.0)
    assert table.sweep(5.0) == (second,)
    assert table.sweep(6.0) == (third,)
    assert table.live_keys() == (first,)


@pytest.mark.parametrize(
    "change",
    [{"block_id": BlockId(1)}, {"generation": 1}, {"valid_tokens": 3}, {"logical": 1}],
)
def test_a_block_is_authorised_only_as_it_was_granted(table, change):
    granted(table)
    with pytest.raises(CorruptTransferError, match="not granted"):
        table.authorize(KEY, [dataclasses.replace(BLOCKS[0], **change)], 1.0)


def test_a_block_that_is_not_granted_yet_is_not_authorised(table):
    opened(table)
    table.extend(KEY, BLOCKS[:2], None, 0.0)
    table.authorize(KEY, BLOCKS[:2], 0.0)
    with pytest.raises(CorruptTransferError):
        table.authorize(KEY, BLOCKS[:3], 0.0)


def test_a_freed_block_is_not_authorised(table, pool):
    granted(table)
    pool.generations[8] += 1
    table.authorize(KEY, BLOCKS[:1], 1.0)
    with pytest.raises(InvalidTransferError, match="block 8"):
        table.authorize(KEY, BLOCKS, 1.0)


def test_grants_are_numbered_and_only_the_last_carries_the_first_token(table):
    opened(table)
    table.extend(KEY, BLOCKS[:2], None, 0.0)
    table.extend(KEY, BLOCKS[2:], FIRST, 0.0)
    grants = table.grants_from(KEY, 0, 1.0)
    assert [grant.sequence_number for grant in grants] == [0, 1]
    assert [grant.first for grant in grants] == [None, FIRST]
    assert table.grants_from(KEY, 1, 1.0) == grants[1:]


def test_a_grant_after_the_end_is_a_value_not_an_error(table):
    opened(table)
    table.revoke(KEY, "aborted", 1.0)
    assert not table.extend(KEY, BLOCKS, FIRST, 1.0)
    opened(table, transfer_key("other"))
    assert not table.extend(transfer_key("other"), BLOCKS, FIRST, 5.0)


@pytest.mark.parametrize(
    ("blocks", "first", "why"),
    [
        (BLOCKS[:1], None, "twice"),
        ((BLOCKS[2], BLOCKS[2]), None, "twice"),
        (BLOCKS[2:3] + BLOCKS[4:], FIRST, "hole"),
    ],
)
def test_the_owner_cannot_grant_nonsense(table, blocks, first, why):
    opened(table)
    table.extend(KEY, BLOCKS[:2], None, 0.0)
    with pytest.raises(ValueError, match=why):
        table.extend(KEY, blocks, first, 0.0)
    assert len(table.grants_from(KEY, 0, 0.0)) == 1


def test_nothing_is_granted_after_the_last_grant(table):
    granted(table)
    with pytest.raises(ValueError, match="granted"):
        table.extend(KEY, (), None, 0.0)


def test_a_transfer_has_one_session(table):
    opened(table)
    table.attach(KEY, 0.0)
    with pytest.raises(LinkRefusedError, match="already"):
        table.attach(KEY, 0.0)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_was_seen_is_refused(table, epoch):
    opened(table, transfer_key(epoch=1))
    with pytest.raises(LinkRefusedError, match="not above 1"):
        table.open(transfer_key(epoch=epoch), 1.0)


def test_an_epoch_that_ended_is_refused_too(table):
    opened(table)
    table.revoke(KEY, "aborted", 0.0)
    with pytest.raises(LinkRefusedError):
        table.open(KEY, 1.0)


def test_a_higher_epoch_revokes_the_live_one(table):
    granted(table)
    later = transfer_key(epoch=1)
    table.open(later, 1.0)
    assert table.take_ended() == ((KEY, ReleaseReason.REVOKED),)
    with pytest.raises(LinkRefusedError, match="epoch 1, not 0"):
        table.confirm(KEY, 1.0)
    with pytest.raises(LinkRefusedError):
        table.renew(KEY, 1.0)
    assert table.release(KEY, ReleaseReason.PEER_LOST, 1.0) is None
    assert table.live_keys() == (later,)


def test_a_higher_epoch_after_expiry_reports_the_expiry(table):
    opened(table)
    table.open(transfer_key(epoch=1), 5.0)
    assert table.take_ended() == ((KEY, ReleaseReason.EXPIRED),)


def test_a_higher_epoch_may_follow_an_ended_one(table):
    opened(table)
    table.release(KEY, ReleaseReason.PEER_LOST, 1.0)
    table.open(transfer_key(epoch=3), 2.0)
    assert table.take_ended() == ((KEY, ReleaseReason.PEER_LOST),)


def test_an_epoch_that_is_not_open_yet_is_refused(table):
    opened(table)
    with pytest.raises(LinkRefusedError, match="epoch 0, not 1"):
        table.renew(transfer_key(epoch=1), 0.0)


@pytest.mark.parametrize(
    "key", [transfer_key(prefill="p-0"), transfer_key(decode="d-2"), transfer_key("unknown")]
)
def test_a_transfer_of_another_process_is_refused_by_name(table, key):
    granted(table)
    for question in (table.renew, table.confirm, table.attach):
        with pytest.raises(LinkRefusedError, match=r"p-0|d-2|unknown"):
            question(key, 1.0)
    with pytest.raises(LinkRefusedError):
        table.authorize(key, BLOCKS, 1.0)
    assert table.release(key, ReleaseReason.RELEASED, 1.0) is None
    assert table.num_live == 1


def test_a_transfer_for_an_earlier_incarnation_is_not_opened(table):
    with pytest.raises(LinkRefusedError, match="p-0"):
        table.open(transfer_key(prefill="p-0"), 0.0)


@pytest.mark.parametrize(
    "reason", [ReleaseReason.RELEASED, ReleaseReason.PEER_LOST, ReleaseReason.REVOKED]
)
def test_the_first_reason_to_end_wins(table, reason):
    granted(table)
    assert table.release(KEY, reason, 1.0) is reason
    assert table.release(KEY, ReleaseReason.RELEASED, 2.0) is reason
    assert table.revoke(KEY, "late", 9.0) is reason
    assert table.take_ended() == ((KEY, reason),)


def test_a_release_after_expiry_finds_it_expired(table):
    opened(table)
    assert table.release(KEY, ReleaseReason.RELEASED, 5.0) is ReleaseReason.EXPIRED


def test_only_confirm_confirms(table):
    opened(table)
    with pytest.raises(ValueError, match="confirm"):
        table.release(KEY, ReleaseReason.CONFIRMED, 0.0)


def test_late_messages_are_answered_by_what_happened(table):
    granted(table)
    table.revoke(KEY, "client left", 1.0)
    with pytest.raises(LeaseLostError, match=r"revoked.*client left"):
        table.renew(KEY, 30.0)
    with pytest.raises(LeaseLostError):
        table.grants_from(KEY, 0, 30.0)
    with pytest.raises(LeaseLostError):
        table.attach(KEY, 30.0)
    assert table.confirm(KEY, 30.0) is Verdict.INVALID


def test_ended_transfers_are_forgotten_after_a_while(pool):
    table = LeaseTable(
        incarnation="p-1", generation_of=pool.generation_of, lease_s=5.0, remember_s=10.0
    )
    opened(table)
    table.revoke(KEY, "aborted", 1.0)
    table.sweep(10.9)
    with pytest.raises(LeaseLostError):
        table.renew(KEY, 10.9)
    table.sweep(11.0)
    with pytest.raises(LinkRefusedError, match="unknown"):
        table.renew(KEY, 11.0)


def test_memory_of_ended_transfers_is_bounded_and_the_oldest_goes_first(pool):
    table = LeaseTable(
        incarnation="p-1", generation_of=pool.generation_of, lease_s=5.0, max_remembered=2
    )
    keys = [transfer_key(name) for name in "abc"]
    for key in keys:
        opened(table, key)
        table.revoke(key, "aborted", 0.0)
        table.check_invariants()
    with pytest.raises(LinkRefusedError, match="unknown"):
        table.renew(keys[0], 0.0)
    for key in keys[1:]:
        with pytest.raises(LeaseLostError):
            table.renew(key, 0.0)
    assert len(table.take_ended()) == 3


def test_a_table_that_remembers_nothing_still_ends_superseded_epochs(pool):
    table = LeaseTable(
        incarnation="p-1", generation_of=pool.generation_of, lease_s=5.0, max_remembered=0
    )
    opened(table)
    table.open(transfer_key(epoch=1), 0.0)
    table.check_invariants()
    assert table.take_ended() == ((KEY, ReleaseReason.REVOKED),)


def test_a_lease_must_last(pool):
    with pytest.raises(ValueError, match="positive"):
        LeaseTable(incarnation="p-1", generation_of=pool.generation_of, lease_s=0.0)


def test_no_terminal_state_takes_an_event():
    for state in ENDED:
        assert not [event for event in LeaseEvent if event in TRANSITIONS[state]]


def test_last_grant_leaves_no_group_out(table):
    table.open(KEY, 0.0, first_blocks=(0, len(BLOCKS) - 1))
    other = dataclasses.replace(BLOCKS[-1], logical=logical_block(1, len(BLOCKS) - 1))
    with pytest.raises(ValueError, match="hole"):
        table.extend(KEY, BLOCKS, FIRST, 0.0)
    assert table.extend(KEY, (*BLOCKS, other), FIRST, 0.0)


def test_last_grant_begins_behind_what_the_receiver_has(table):
    table.open(KEY, 0.0, first_blocks=(1,))
    with pytest.raises(ValueError, match="hole"):
        table.extend(KEY, BLOCKS, FIRST, 0.0)
    assert table.extend(KEY, BLOCKS[1:], FIRST, 0.0)
    assert table.confirm(KEY, 0.0) is Verdict.VALID
