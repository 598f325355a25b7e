"""Log-probabilities as bytes: they come back as they were, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.logprobs import TokenLogprobs, pack_logprobs, unpack_logprobs

values = st.floats(max_value=0, allow_nan=False, width=32)
ids = st.integers(0, 2**32 - 1)
lists = st.lists(
    st.builds(
        TokenLogprobs,
        logprob=values,
        rank=ids,
        top=st.lists(st.tuples(ids, values), max_size=4).map(tuple),
    ),
    max_size=6,
).map(tuple)


@given(logprobs=lists)
def test_they_come_back_as_they_were(logprobs):
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


@given(logprobs=lists, cut=st.integers(1, 30))
def test_cut_or_padded_bytes_are_refused(logprobs, cut):
    packed = pack_logprobs(logprobs)
    for damaged in (packed[: max(0, len(packed) - cut)], packed + bytes(cut)):
        with pytest.raises(ValueError, match=r"log-probabilities|alternatives"):
            unpack_logprobs(damaged)


@given(payload=st.binary(max_size=120))
def test_any_bytes_are_read_or_refused(payload):
    try:
        logprobs = unpack_logprobs(payload)
    except ValueError:
        return
    assert len(pack_logprobs(logprobs)) == len(payload)
