from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.terminal.sse import decode_events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data:a\n\n", ["a"]),
        ("data:  a\n\n", [" a"]),
        ("data: a\ndata: b\n\n", ["a\nb"]),
        ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
        (": keep-alive\n\ndata: a\n\n", ["a"]),
        ("event: x\nid: 1\nretry: 2\ndata: a\n\n", ["a"]),
        ("data\n\n", [""]),
        ("data: a: b\n\n", ["a: b"]),
        ("data: \u2028\x85\x0b\n\n", ["\u2028\x85\x0b"]),
        ("\n\n\n", []),
        ("data: a\n", []),
        ("data: a", []),
        ("", []),
    ],
)
def test_events_are_what_the_standard_says(text: str, events: list[str]) -> None:
    assert list(decode_events([text.encode()])) == events


@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    data=st.data(),
)
def test_chunk_borders_change_nothing(texts: list[str], end: str, data: st.DataObject) -> None:
    # One more line end: a CR at the very end cannot be told from half of a CR LF.
    stream = ("".join(f"data: {text}{end}{end}" for text in texts) + end).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    borders = [0, *cuts, len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(borders)]

    assert list(decode_events(chunks)) == texts
