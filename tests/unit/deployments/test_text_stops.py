"""Stop strings: found at the earliest end, never leaked, independent of how text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.text.stops import StopFilter

ALPHABET = "ab\uac00"
texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def cut_at(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def by_definition(text: str, stops: list[str], after: int = 0) -> tuple[str, str | None]:
    """What is left of a text that comes character by character, if it may end after so many."""
    for end in range(after + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def filtered(pieces: list[str], stops: list[str]) -> tuple[list[str], StopFilter]:
    """Everything that a filter lets through, until it has found a stop string."""
    stop_filter = StopFilter(stops)
    out = []
    for piece in pieces:
        out.append(stop_filter.push(piece))
        if stop_filter.matched is not None:
            return out, stop_filter
    return [*out, stop_filter.flush()], stop_filter


@settings(deadline=None)
@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_text_ends_before_the_stop_string_however_it_is_cut(text, stops, cuts):
    out, stop_filter = filtered(cut_at(text, cuts), stops)
    assert ("".join(out), stop_filter.matched) == by_definition(text, stops)


@settings(deadline=None)
@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_pieces_come_out_whole_except_the_last(text, stops, cuts):
    """Row 31: a delta never cuts a token's text in two."""
    pieces = cut_at(text, cuts)
    bounds = {len("".join(pieces[:count])) for count in range(len(pieces) + 1)}
    out, stop_filter = filtered(pieces, stops)
    if stop_filter.matched is not None:
        out = out[:-1]
    assert all(len("".join(out[:count])) in bounds for count in range(len(out) + 1))


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    stop_filter = StopFilter(["END"])
    assert [stop_filter.push(piece) for piece in ("a", "E", "x", "EN", "D")] == [
        "a",
        "",
        "Ex",
        "",
        "",
    ]
    assert stop_filter.matched == "END"


def test_of_two_complete_at_once_the_longest_wins():
    stop_filter = StopFilter(["b", "ab"])
    assert stop_filter.push("xab") == "x"
    assert stop_filter.matched == "ab"


@settings(deadline=None)
@given(early=texts, late=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_a_stop_string_that_is_complete_too_early_does_not_hide_a_later_one(
    early, late, stops, cuts
):
    stop_filter = StopFilter(stops)
    text = "".join(stop_filter.push(piece, may_stop=False) for piece in cut_at(early, cuts))
    for piece in cut_at(late, cuts):
        if stop_filter.matched is None:
            text += stop_filter.push(piece)
    text += stop_filter.flush()
    expected = by_definition(early + late, stops, after=len(early))
    assert (text, stop_filter.matched) == expected


def test_a_stop_string_that_may_not_stop_yet_is_text():
    stop_filter = StopFilter(["ab"])
    assert stop_filter.push("ab", may_stop=False) == "ab"
    assert stop_filter.matched is None
    assert stop_filter.push("ab") == ""
    assert stop_filter.matched == "ab"


def test_a_stop_string_may_begin_before_stopping_is_allowed():
    stop_filter = StopFilter(["ab"])
    assert stop_filter.push("aba", may_stop=False) == ""
    assert stop_filter.push("b") == "ab"
    assert stop_filter.matched == "ab"


def test_without_stop_strings_everything_goes_through():
    stop_filter = StopFilter([])
    assert (stop_filter.push("ab"), stop_filter.flush()) == ("ab", "")
