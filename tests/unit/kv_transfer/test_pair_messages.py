"""What the ends of a pair say to each other survives the wire, and nothing else passes for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transport import CorruptTransferError
from kv_transfer.transports.pair_messages import Entry, Ready, Turn

epochs = st.integers(0, 2**64 - 1)


@given(epochs, st.booleans())
def test_turns_and_answers_come_back_as_they_were(epoch, flag):
    turn = Turn(epoch=epoch, is_new=flag)
    assert Turn.unpack(turn.pack()) == turn
    ready = Ready(epoch=epoch, is_paired=flag)
    assert Ready.unpack(ready.pack()) == ready


@given(epochs, st.text(max_size=40), st.binary(max_size=40))
def test_entries_come_back_as_they_were(epoch, key, value):
    entry = Entry(epoch=epoch, key=key, value=value)
    assert Entry.unpack(entry.pack()) == entry


@given(st.sampled_from([Turn, Ready, Entry]), st.binary(max_size=30))
def test_other_bytes_are_refused_or_are_a_message(kind, payload):
    try:
        kind.unpack(payload)
    except CorruptTransferError:
        return


@pytest.mark.parametrize("payload", [b"", b"\0" * 8, b"\0" * 10])
def test_another_length_is_refused(payload):
    with pytest.raises(CorruptTransferError, match="expected"):
        Turn.unpack(payload)


def test_a_key_beyond_the_end_or_not_text_is_refused():
    packed = Entry(epoch=1, key="key", value=b"").pack()
    with pytest.raises(CorruptTransferError, match="3 bytes in 2"):
        Entry.unpack(packed[:-1])
    with pytest.raises(CorruptTransferError, match="not text"):
        Entry.unpack(packed[:-1] + b"\xff")
