"""Counts of tokens, kept as they come, against counting them all."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.token_counts import SeenTokens, TokenCounts

token_ids = st.lists(st.integers(0, 9) | st.integers(0, 2**40), max_size=30)


def read(seen: SeenTokens) -> dict[int, int]:
    ids, counts = array("q", seen.ids), array("q", seen.output_counts)
    assert len(ids) == len(counts) == len(set(ids))
    return dict(zip(ids, counts, strict=True))


@given(prompt=token_ids, output=token_ids)
def test_counts_are_those_of_counting_all_tokens(prompt, output):
    counts = TokenCounts(prompt)
    for place, token_id in enumerate(output):
        before = counts.seen()
        expected = {each: Counter(output[:place])[each] for each in [*prompt, *output[:place]]}
        counts.add(token_id)
        assert read(before) == expected  # what was given out does not change
    assert read(counts.seen()) == {each: Counter(output)[each] for each in [*prompt, *output]}
