"""Both ends of a pair cut the blocks of a turn alike, and leave no byte out."""

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports import pair_plan
from kv_transfer.transports.pair_plan import MESSAGE_BYTES, blocks_per_turn, messages_of


@given(num_blocks=st.integers(0, 70), bytes_per_block=st.integers(1, 5 * MESSAGE_BYTES))
def test_every_byte_goes_once_and_in_order(num_blocks, bytes_per_block):
    spans = [span for message in messages_of(num_blocks, bytes_per_block) for span in message]
    positions = [
        (span.block * bytes_per_block + span.start, span.block * bytes_per_block + span.stop)
        for span in spans
    ]
    assert [start for start, _ in positions] == [0, *(stop for _, stop in positions[:-1])][
        : len(positions)
    ]
    assert (positions[-1][1] if positions else 0) == num_blocks * bytes_per_block
    assert all(0 <= span.start < span.stop <= bytes_per_block for span in spans)


@given(num_blocks=st.integers(1, 70), bytes_per_block=st.integers(1, 5 * MESSAGE_BYTES))
def test_no_message_is_over_the_size_of_its_slot(num_blocks, bytes_per_block):
    for message in messages_of(num_blocks, bytes_per_block):
        assert 0 < sum(span.stop - span.start for span in message) <= MESSAGE_BYTES


def test_small_blocks_share_messages_and_large_ones_go_alone():
    assert len(messages_of(32, 64 * 1024)) == 2
    assert len(messages_of(3, 720 * 1024)) == 3
    assert len(messages_of(1, 2 * MESSAGE_BYTES)) == 2


def test_a_turn_is_bounded_and_never_empty(monkeypatch):
    monkeypatch.setattr(pair_plan, "TURN_BYTES", 1000)
    assert blocks_per_turn(300) == 3
    assert blocks_per_turn(5000) == 1
