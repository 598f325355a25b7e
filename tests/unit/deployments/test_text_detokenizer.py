"""Detokenization as tokens come: whole characters, and in sum what decoding at once gives."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deployments.text.detokenizer import Detokenizer
from tests.fakes.tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

REPLACEMENT = "\ufffd"
MIXED = "a\u00e9\uc548\ub155\U0001f600\U0001f469\u200d\U0001f4bb \n"


@cache
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@cache
def byte_fallback() -> Tokenizer:
    return byte_fallback_tokenizer()


def deltas_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.lists(st.integers(0, 399), max_size=40))
def test_any_ids_in_sum_give_the_text_of_all_of_them(token_ids):
    """Rows 45 and 53, special tokens and ill-formed bytes included."""
    token_ids = [token_id % byte_level().get_vocab_size() for token_id in token_ids]
    assert "".join(deltas_of(byte_level(), token_ids)) == byte_level().decode(token_ids)


@settings(deadline=None)
@given(st.text(st.one_of(st.sampled_from(MIXED), st.characters(codec="utf-8")), max_size=20))
def test_real_text_comes_in_whole_characters(text):
    """Row 45: nothing of a character goes out before the token that completes it."""
    text = text.replace(REPLACEMENT, "")
    deltas = deltas_of(byte_level(), byte_level().encode(text).ids)
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert deltas[-1] == ""


@settings(deadline=None)
@given(st.text("abc the fox" + MIXED, max_size=20))
def test_byte_fallback_text_keeps_its_spaces_and_characters(text):
    token_ids = byte_fallback().encode(text).ids
    deltas = deltas_of(byte_fallback(), token_ids)
    assert "".join(deltas) == byte_fallback().decode(token_ids)
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_half_a_character_waits_for_its_other_tokens():
    token_ids = byte_level().encode("\U0001f600").ids
    assert len(token_ids) == 4
    assert deltas_of(byte_level(), token_ids) == ["", "", "", "\U0001f600", ""]


def test_half_a_character_at_the_end_is_given_out_as_it_is():
    token_ids = byte_level().encode("a\U0001f600").ids[:-1]
    assert deltas_of(byte_level(), token_ids) == ["a", "", "", "", REPLACEMENT]


def test_half_a_character_before_another_is_not_lost():
    token_ids = [*byte_level().encode("\U0001f600").ids[:2], *byte_level().encode("b").ids]
    assert deltas_of(byte_level(), token_ids) == ["", "", f"{REPLACEMENT}b", ""]


def test_text_given_out_stands_when_later_bytes_would_change_it():
    """In a byte-fallback vocabulary one bad byte spoils its whole run when decoded at once."""
    good, bad = byte_fallback().encode("\u00e9").ids[1:], byte_fallback().token_to_id("<0xF0>")
    deltas = deltas_of(byte_fallback(), [*good, bad, byte_fallback().token_to_id("x")])
    assert "".join(deltas) == f"\u00e9{REPLACEMENT}x"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_the_decoders_to_skip(skip):
    detokenizer = Detokenizer(lambda ids: byte_level().decode(ids, skip_special_tokens=skip))
    text = "".join(detokenizer.push(token_id) for token_id in [0, *byte_level().encode("a").ids, 1])
    assert text + detokenizer.flush() == ("a" if skip else "<|start|>a<|end|>")
