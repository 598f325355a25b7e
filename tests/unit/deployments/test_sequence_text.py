"""Events of one sequence to deltas: the same text, end and count however tokens are framed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.openai.answer import Ending
from deployments.openai.errors import GenerationFailedError
from deployments.text.sequence_text import SequenceText, TextOptions
from deployments.text.vocabulary import Vocabulary
from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.backend import frame, frames, made_up, scored_frames
from tests.fakes.tokenizer import byte_level_tokenizer
from workers.messages import Failed, FailureCode, Finished, FinishReason, GenerateEvent, PromptFrame


@cache
def tokenizer():
    return byte_level_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text).ids


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer())


def sequence_text(stops=(), min_tokens=0, **options) -> SequenceText:
    decode = tokenizer().decode
    return SequenceText(
        3,
        TextOptions(
            decode=decode,
            token_bytes=vocabulary().token_bytes,
            stops=tuple(stops),
            min_tokens=min_tokens,
            **options,
        ),
    )


def end(count: int, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(
        attempt=0, reason=reason, prompt_tokens=9, completion_tokens=count, cached_tokens=4
    )


def played(text: SequenceText, events: list[GenerateEvent]):
    """The deltas of the events up to the end."""
    deltas = []
    for event in events:
        delta = text.accept(event)
        if delta is not None:
            deltas.append(delta)
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


# Log-probabilities -------------------------------------------------------------------------------


def shown(deltas) -> list[tuple[int, int]]:
    """(token id, offset) of every token that the deltas show."""
    return [(entry.token.token_id, entry.offset) for delta in deltas for entry in delta.tokens]


@settings(deadline=None)
@given(
    text=st.lists(words, max_size=12).map("".join),
    stops=st.lists(st.sampled_from(["END", "ND", "\ub155", "g\uc548", "dogE"]), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=6),
    offset=st.integers(0, 3),
)
def test_tokens_come_with_their_text_however_they_are_framed(text, stops, sizes, offset):
    """Rows 31, 32 and 66: ids, text and log-probabilities agree, in each delta and in all."""
    token_ids = ids_of(text)
    answers = []
    for cut in ([], sizes, [len(token_ids)]):
        sequence = sequence_text(stops, num_logprobs=2, prompt_text="p" * offset)
        events = [*scored_frames(token_ids, 2, cut), end(len(token_ids))]
        deltas = played(sequence, events)
        given = offset
        for delta in deltas:
            # Joined up to a delta, the tokens' bytes are its text, or a stop string cut them.
            at = given
            given += len(delta.text)
            assert all(at <= entry.offset < given for entry in delta.tokens[:1]) or not delta.text
        answers.append((shown(deltas), [e.token.logprob for d in deltas for e in d.tokens]))
        joined = b"".join(entry.token.data for delta in deltas for entry in delta.tokens)
        answer = "".join(delta.text for delta in deltas)
        assert joined.decode(errors="ignore").startswith(answer)
        if deltas[-1].ending.stop_reason is None:
            assert [token_id for token_id, _ in shown(deltas)] == token_ids
            assert joined.decode() == answer
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][1] == [made_up(token_id, 2).logprob for token_id, _ in answers[0][0]]


def test_the_tokens_of_one_character_come_together_at_its_place():
    token_ids = ids_of("a\U0001f600b")
    sequence = sequence_text(num_logprobs=0)
    deltas = played(sequence, [*scored_frames(token_ids, 0), end(len(token_ids))])
    offsets = [offset for _, offset in shown(deltas)]
    assert offsets == [0, *[1] * (len(token_ids) - 2), 2]
    by_text = {delta.text: len(delta.tokens) for delta in deltas if delta.text}
    assert by_text == {"a": 1, "\U0001f600": len(token_ids) - 2, "b": 1}


def test_tokens_of_half_a_character_are_shown_with_the_end():
    token_ids = ids_of("a\U0001f600")[:-1]
    sequence = sequence_text(num_logprobs=0)
    deltas = played(sequence, [*scored_frames(token_ids, 0), end(len(token_ids))])
    assert [token_id for token_id, _ in shown(deltas)] == token_ids


def test_tokens_without_text_are_shown():
    """A special token that the text leaves out."""
    token_ids = [*ids_of("x"), 0, 0]
    sequence = sequence_text(num_logprobs=0)
    deltas = played(sequence, [*scored_frames(token_ids, 0), end(3)])
    assert shown(deltas) == [(token_ids[0], 0), (0, 1), (0, 1)]


def test_tokens_of_a_stop_string_are_not_shown():
    """Row 32."""
    token_ids = ids_of("the quick") + ids_of("END")
    sequence = sequence_text(["END"], num_logprobs=0)
    deltas = played(sequence, [*scored_frames(token_ids, 0), end(9)])
    assert "".join(delta.text for delta in deltas) == "the quick"
    assert [token_id for token_id, _ in shown(deltas)] == ids_of("the quick")


def test_nothing_is_shown_that_is_not_asked_for():
    deltas = played(sequence_text(), [*frames(ids_of("a b")), end(2)])
    assert all(delta.tokens == () and delta.prompt is None for delta in deltas)


def prompt_frames(token_ids) -> list[GenerateEvent]:
    """The log-probabilities of a prompt, in two frames."""
    scored = [made_up(token_id, 3) for token_id in token_ids[1:]]
    return [
        PromptFrame(attempt=0, logprobs=tuple(scored[:2])),
        PromptFrame(attempt=0, logprobs=tuple(scored[2:])),
    ]


def test_an_echo_begins_the_text_and_its_tokens():
    """Rows 59, 62 and 63: tokens joined are the prompt, and the first has no log-probability."""
    prompt = "\n1. Carol has 20"
    prompt_ids, token_ids = ids_of(prompt), ids_of(" dog")
    sequence = sequence_text(
        ["Carol"],
        num_logprobs=1,
        is_echoed=True,
        prompt_text=prompt,
        prompt_token_ids=tuple(prompt_ids),
    )
    events = [*prompt_frames(prompt_ids), *scored_frames(token_ids, 1), end(len(token_ids))]
    deltas = played(sequence, events)
    assert "".join(delta.text for delta in deltas) == prompt + " dog"
    entries = [entry for delta in deltas for entry in delta.tokens]
    assert [entry.token.token_id for entry in entries] == prompt_ids + token_ids
    assert "".join(entry.token.text for entry in entries) == prompt + " dog"
    assert [entry.token.logprob is None for entry in entries] == [True] + [False] * (
        len(entries) - 1
    )
    texts = [(prompt + " dog")[entry.offset :] for entry in entries]
    assert all(
        text.startswith(entry.token.text) for text, entry in zip(texts, entries, strict=True)
    )
    assert deltas[-1].completion_tokens == len(token_ids)


def test_a_prompt_is_shown_apart_from_the_text_once():
    prompt_ids, token_ids = ids_of("the fox"), ids_of(" dog")
    sequence = sequence_text(num_prompt_logprobs=3, prompt_token_ids=tuple(prompt_ids))
    events = [*prompt_frames(prompt_ids), *frames(token_ids), end(len(token_ids))]
    first, *others = played(sequence, events)
    assert [entry.token.token_id for entry in first.prompt] == prompt_ids
    assert [len(entry.top) for entry in first.prompt] == [0, *[3] * (len(prompt_ids) - 1)]
    assert all(delta.prompt is None and delta.tokens == () for delta in others)
    assert first.tokens == ()


@pytest.mark.parametrize("ends_first", [False, True])
def test_an_echo_without_output_is_the_prompt_alone(ends_first):
    """Row 43."""
    sequence = sequence_text(is_echoed=True, prompt_text="the fox", has_output=False)
    (delta,) = played(sequence, [end(1, FinishReason.STOP)] if ends_first else frames([9]))
    assert (delta.text, delta.completion_tokens) == ("the fox", 0)
    assert delta.ending == Ending(finish_reason="length")


def test_a_start_token_that_is_not_in_the_prompts_text_takes_no_place():
    prompt_ids = (0, *ids_of("the fox"))
    sequence = sequence_text(
        num_logprobs=0, is_echoed=True, prompt_text="the fox", prompt_token_ids=prompt_ids
    )
    events = [*prompt_frames(prompt_ids), *scored_frames(ids_of(" dog"), 0), end(1)]
    offsets = [entry.offset for entry in played(sequence, events)[0].tokens[: len(prompt_ids)]]
    assert offsets[:2] == [0, 0]
    assert offsets[-1] == len("the")


def test_a_clients_stop_token_is_named_and_the_models_own_is_not():
    finished = Finished(
        attempt=0,
        reason=FinishReason.STOP,
        prompt_tokens=9,
        completion_tokens=1,
        stop_token_id=7,
    )
    (own,) = played(sequence_text(stop_token_ids=frozenset({8})), [finished])
    (asked,) = played(sequence_text(stop_token_ids=frozenset({7})), [finished])
    assert own.ending == Ending(finish_reason="stop")
    assert asked.ending == Ending(finish_reason="stop", stop_reason=7)


def test_alternatives_beyond_those_asked_for_are_left_out():
    """A prompt may be scored with more of them, for another field."""
    scored = TokenLogprobs(logprob=-1.0, rank=4, top=((5, -0.1), (6, -0.2), (7, -0.3)))
    prompt_ids = tuple(ids_of("the fox"))
    sequence = sequence_text(
        num_logprobs=1,
        num_prompt_logprobs=2,
        is_echoed=True,
        prompt_text="the fox",
        prompt_token_ids=prompt_ids,
    )
    frames_ = [PromptFrame(attempt=0, logprobs=(scored,) * (len(prompt_ids) - 1)), end(0)]
    (delta,) = played(sequence, frames_)
    assert {len(entry.top) for entry in delta.tokens[1:]} == {1}
    assert {len(entry.top) for entry in delta.prompt[1:]} == {2}
