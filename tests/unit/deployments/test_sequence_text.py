"""Events of one sequence to deltas: the same text, end and count however tokens are framed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.openai.answer import Ending
from deployments.openai.errors import GenerationFailedError
from deployments.text.sequence_text import SequenceText
from tests.fakes.backend import frame, frames
from tests.fakes.tokenizer import byte_level_tokenizer
from workers.messages import Failed, FailureCode, Finished, FinishReason, GenerateEvent


@cache
def tokenizer():
    return byte_level_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def sequence_text(stops=(), min_tokens=0) -> SequenceText:
    return SequenceText(index=3, decode=tokenizer().decode, stops=stops, min_tokens=min_tokens)


def end(count: int, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(
        attempt=0, reason=reason, prompt_tokens=9, completion_tokens=count, cached_tokens=4
    )


def played(text: SequenceText, events: list[GenerateEvent]):
    """The deltas of the events up to the end."""
    deltas = []
    for event in events:
        deltas.append(text.accept(event))
        if text.has_ended:
            break
    return deltas


words = st.sampled_from(["the ", "dog", "\uc548\ub155", "\U0001f600", "END", "E", "ND", "x"])


@settings(deadline=None)
@given(
    text=st.lists(words, max_size=12).map("".join),
    stops=st.lists(st.sampled_from(["END", "ND", "\ub155", "g\uc548", "dogE"]), max_size=3),
    min_tokens=st.integers(0, 8),
    sizes=st.lists(st.integers(0, 5), max_size=6),
)
def test_framing_does_not_change_the_answer(text, stops, min_tokens, sizes):
    """Rows 29 and 53: text, end and count depend on the tokens alone."""
    token_ids = ids_of(text)
    answers = []
    for cut in ([], sizes, [len(token_ids)]):
        sequence = sequence_text(stops, min_tokens)
        deltas = played(sequence, [*frames(token_ids, cut), end(len(token_ids))])
        answers.append(
            (
                "".join(delta.text for delta in deltas),
                deltas[-1].ending,
                sequence.completion_tokens,
                deltas[-1].completion_tokens,
            )
        )
    assert answers[0] == answers[1] == answers[2]


def test_a_stop_string_across_tokens_is_removed_and_named():
    """Rows 29 and 33: cut in the middle of two tokens, not in the text, reason stop."""
    token_ids = ids_of("the quick brown fox")
    assert len(token_ids) > 3
    sequence = sequence_text(stops=["ck br"])
    deltas = played(sequence, [*frames(token_ids), end(len(token_ids))])
    assert "".join(delta.text for delta in deltas) == "the qui"
    assert deltas[-1].ending == Ending(finish_reason="stop", stop_reason="ck br")
    assert sequence.completion_tokens < len(token_ids)
    assert sequence.cached_tokens == 0, "known from the first frame, not only at a worker's end"


def test_text_held_back_for_a_stop_string_comes_with_the_end():
    sequence = sequence_text(stops=["fox!"])
    deltas = played(sequence, [frame(*ids_of("a fox")), end(9, FinishReason.STOP)])
    assert "".join(delta.text for delta in deltas) == "a fox"
    assert deltas[-1].ending == Ending(finish_reason="stop", stop_reason=None)
    assert (deltas[-1].index, deltas[-1].completion_tokens, sequence.cached_tokens) == (3, 9, 4)


def test_a_stop_string_completed_by_the_last_bytes_stops():
    sequence = sequence_text(stops=["\ufffd"])
    deltas = played(sequence, [frame(*ids_of("a\U0001f600")[:-1]), end(4)])
    assert [delta.text for delta in deltas] == ["a", ""]
    assert deltas[-1].ending == Ending(finish_reason="stop", stop_reason="\ufffd")


def test_min_tokens_counts_output_and_keeps_stop_strings_off():
    """Row 37: stop strings count from the token that completes min_tokens."""
    token_ids = ids_of("x") * 6
    for min_tokens in range(7):
        sequence = sequence_text(stops=["x"], min_tokens=min_tokens)
        deltas = played(sequence, [frame(*token_ids), end(6)])
        expected = "x" * (max(min_tokens, 1) - 1)
        assert "".join(delta.text for delta in deltas) == expected


def test_a_failure_is_raised_with_its_code():
    failed = Failed(attempt=0, code=FailureCode.QUEUE_FULL, message="full", retry_after_s=3.0)
    with pytest.raises(GenerationFailedError, match="full") as caught:
        sequence_text().accept(failed)
    assert (caught.value.failure, caught.value.retry_after_s) == (FailureCode.QUEUE_FULL, 3.0)


def test_cached_tokens_are_known_where_a_stop_string_ends_the_text():
    (frame,) = frames(ids_of("fox"), sizes=[len(ids_of("fox"))])
    sequence = sequence_text(stops=["fox"])
    assert sequence.cached_tokens is None
    played(sequence, [replace(frame, cached_tokens=6)])
    assert sequence.has_ended
    assert sequence.cached_tokens == 6
