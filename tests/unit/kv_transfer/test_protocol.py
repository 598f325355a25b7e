import dataclasses

import pytest

from kv_transfer.geometry import BlockId, LogicalBlock
from kv_transfer.handoff import FirstToken, Grant, Verdict
from kv_transfer.protocol import (
    TRANSITIONS,
    Answered,
    Begin,
    BlockLanded,
    Close,
    Confirm,
    Connect,
    Event,
    Fail,
    Fenced,
    Fetch,
    Granted,
    IllegalEventError,
    Opened,
    Publish,
    ReceiverProtocol,
    Recycle,
    TransferState,
)
from kv_transfer.transport import CorruptTransferError
from tests.fakes.block_memory import granted_blocks

FIRST = FirstToken(token_id=7)
BLOCKS = granted_blocks(10, 4, [3, 2, 1])
EVENTS = [
    Begin(),
    Opened(),
    Granted(Grant(sequence_number=0, blocks=BLOCKS, first=FIRST)),
    BlockLanded(BLOCKS[0]),
    Answered(Verdict.VALID),
    Publish(),
    Fail(),
    Fenced(),
    Recycle(),
]


def places(plain):
    return {LogicalBlock(logical): BlockId(block_id) for logical, block_id in plain.items()}


def protocol(num_tokens=10, placement=(10, 11, 12)):
    return ReceiverProtocol(
        num_tokens=num_tokens, block_size=4, placement=[BlockId(b) for b in placement]
    )


def active(**kwargs):
    made = protocol(**kwargs)
    made.apply(Begin())
    made.apply(Opened())
    return made


def landed():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS, first=FIRST)))
    for block in BLOCKS:
        made.apply(BlockLanded(block))
    return made


def in_state(state):
    """A protocol in each state, by the shortest way there."""
    made = protocol()
    if state in (TransferState.LANDED, TransferState.CONFIRMED, TransferState.PUBLISHED):
        made = landed()
    ways: dict[TransferState, list[Event]] = {
        TransferState.RESERVED: [],
        TransferState.QUEUED: [Begin()],
        TransferState.ACTIVE: [Begin(), Opened()],
        TransferState.LANDED: [],
        TransferState.CONFIRMED: [Answered(Verdict.VALID)],
        TransferState.PUBLISHED: [Answered(Verdict.VALID), Publish()],
        TransferState.DRAINING: [Fail()],
        TransferState.QUIESCED: [Fail(), Fenced()],
        TransferState.FREE: [Fail(), Fenced(), Recycle()],
    }
    for event in ways[state]:
        made.apply(event)
    assert made.state is state
    return made


def test_every_state_has_a_row():
    assert set(TRANSITIONS) == set(TransferState)


def test_only_ways_over_confirmed_lead_to_published_and_over_quiesced_to_free():
    def sources(target):
        return {
            state
            for state, row in TRANSITIONS.items()
            if any(target in following for following in row.values())
        }

    assert sources(TransferState.PUBLISHED) == {TransferState.CONFIRMED}
    assert sources(TransferState.CONFIRMED) == {TransferState.LANDED}
    assert sources(TransferState.FREE) == {TransferState.QUIESCED}
    assert sources(TransferState.QUIESCED) == {TransferState.DRAINING}


@pytest.mark.parametrize("state", list(TransferState))
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_without_an_entry_is_illegal_and_changes_nothing(state, event):
    made = in_state(state)
    if type(event) in TRANSITIONS[state]:
        try:
            made.apply(event)
        except CorruptTransferError:  # a block that no grant covers, or that is not missing
            assert made.state is state
        assert made.state in TRANSITIONS[state][type(event)]
    else:
        with pytest.raises(IllegalEventError, match=state.value):
            made.apply(event)
        assert made.state is state
    made.check_invariants()


def test_the_whole_way_asks_for_each_action_once():
    made = protocol(placement=(10, 11, 12, 13))
    assert made.apply(Begin()) == Connect()
    assert made.apply(Opened()) is None
    fetch = made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[:2])))
    assert fetch == Fetch(BLOCKS[:2], places({0: 10, 1: 11}))
    assert made.apply(BlockLanded(BLOCKS[1])) is None
    fetch = made.apply(Granted(Grant(sequence_number=1, blocks=BLOCKS[2:], first=FIRST)))
    assert fetch == Fetch(BLOCKS[2:], places({2: 12}))
    assert made.apply(BlockLanded(BLOCKS[2])) is None
    assert made.apply(BlockLanded(BLOCKS[0])) == Confirm()
    assert made.state is TransferState.LANDED
    assert made.first == FIRST
    assert made.apply(Answered(Verdict.VALID)) is None
    assert made.apply(Publish()) is None
    assert made.blocks_landed == 3


def test_full_coverage_waits_for_the_last_grant():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS)))
    for block in BLOCKS:
        assert made.apply(BlockLanded(block)) is None
    assert made.state is TransferState.ACTIVE
    last = Granted(Grant(sequence_number=1, blocks=(), first=FIRST))
    assert made.apply(last) == Confirm()


def test_the_last_grant_waits_for_full_coverage():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS)))
    assert made.apply(Granted(Grant(sequence_number=1, blocks=(), first=FIRST))) is None
    assert made.state is TransferState.ACTIVE


def test_invalid_drains_at_once():
    made = landed()
    assert made.apply(Answered(Verdict.INVALID)) == Close()
    assert made.state is TransferState.DRAINING


@pytest.mark.parametrize("number", [-1, 1, 2])
def test_the_first_grant_must_be_number_0(number):
    made = active()
    with pytest.raises(CorruptTransferError, match="0 was due"):
        made.apply(Granted(Grant(sequence_number=number, blocks=BLOCKS[:1])))
    assert made.state is TransferState.ACTIVE


@pytest.mark.parametrize("number", [0, 2])
def test_a_repeated_or_missing_grant_is_corrupt(number):
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[:1])))
    with pytest.raises(CorruptTransferError, match="1 was due"):
        made.apply(Granted(Grant(sequence_number=number, blocks=BLOCKS[1:2])))
    made.apply(Granted(Grant(sequence_number=1, blocks=BLOCKS[1:2])))


@pytest.mark.parametrize("blocks", [BLOCKS[:2], (BLOCKS[1], BLOCKS[1])])
def test_a_logical_block_granted_twice_is_corrupt(blocks):
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[:1])))
    with pytest.raises(CorruptTransferError, match="repeats"):
        made.apply(Granted(Grant(sequence_number=1, blocks=blocks)))
    made.check_invariants()


def test_a_grant_outside_the_prompt_is_corrupt_before_anything_is_fetched():
    made = active(num_tokens=8, placement=(10, 11, 12))
    with pytest.raises(CorruptTransferError, match="outside"):
        made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS)))


def test_a_grant_with_a_short_block_is_corrupt():
    made = active()
    short = dataclasses.replace(BLOCKS[0], valid_tokens=3)
    with pytest.raises(CorruptTransferError, match="tokens"):
        made.apply(Granted(Grant(sequence_number=0, blocks=(short,))))


def test_a_last_grant_that_leaves_blocks_out_is_corrupt():
    made = active()
    with pytest.raises(CorruptTransferError, match="2 of 3"):
        made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[:2], first=FIRST)))
    assert made.first is None


def test_a_grant_after_the_last_one_is_corrupt():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS, first=FIRST)))
    with pytest.raises(CorruptTransferError, match="after the last"):
        made.apply(Granted(Grant(sequence_number=1, blocks=(), first=FIRST)))


def test_a_block_that_was_not_granted_cannot_land():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[:1])))
    for stray in (BLOCKS[1], dataclasses.replace(BLOCKS[0], generation=9)):
        with pytest.raises(CorruptTransferError, match="not granted"):
            made.apply(BlockLanded(stray))
    assert made.blocks_landed == 0


def test_a_block_cannot_land_twice():
    made = active()
    made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS)))
    made.apply(BlockLanded(BLOCKS[0]))
    with pytest.raises(CorruptTransferError, match="twice"):
        made.apply(BlockLanded(BLOCKS[0]))


@pytest.mark.parametrize(
    "event",
    [BlockLanded(BLOCKS[2]), Granted(Grant(sequence_number=1, blocks=(), first=FIRST))],
)
def test_what_comes_after_everything_has_landed_is_the_peers_mistake(event):
    made = landed()
    with pytest.raises(CorruptTransferError):
        made.apply(event)
    assert made.state is TransferState.LANDED


@pytest.mark.parametrize("placement", [(10, 11), (), (10, 11, 10)])
def test_a_placement_that_is_short_or_repeats_a_block_is_refused(placement):
    with pytest.raises(ValueError, match="placement"):
        protocol(placement=placement)


def skipping():
    """Expects the second and third of three blocks."""
    made = ReceiverProtocol(
        num_tokens=10, block_size=4, placement=[BlockId(11), BlockId(12)], first_blocks=(1,)
    )
    made.apply(Begin())
    made.apply(Opened())
    return made


def test_what_is_there_already_is_neither_placed_nor_fetched():
    made = skipping()
    fetch = made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS[1:], first=FIRST)))
    assert fetch == Fetch(BLOCKS[1:], places({1: 11, 2: 12}))
    assert made.apply(BlockLanded(BLOCKS[1])) is None
    assert made.apply(BlockLanded(BLOCKS[2])) == Confirm()


def test_grant_of_what_is_there_already_is_corrupt():
    """Others may be reading that block: nothing is ever fetched into it."""
    made = skipping()
    with pytest.raises(CorruptTransferError, match="outside"):
        made.apply(Granted(Grant(sequence_number=0, blocks=BLOCKS, first=FIRST)))
    assert made.state is TransferState.ACTIVE
