"""The bytes of single tokens: joined, they are the text, however it is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deployments.text.vocabulary import Vocabulary
from tests.fakes.tokenizer import SPECIAL_TOKENS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


@settings(deadline=None)
@given(text=st.text(max_size=20))
def test_byte_level_tokens_join_to_the_text(text):
    vocabulary = Vocabulary(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text).ids
    assert b"".join(map(vocabulary.token_bytes, ids)) == text.encode()


@settings(deadline=None)
@given(text=st.text(st.sampled_from("the fox\uc548\U0001f600\n"), max_size=20))
def test_byte_fallback_tokens_join_to_the_text_after_its_own_first_space(text):
    vocabulary = Vocabulary(BYTE_FALLBACK)
    ids = BYTE_FALLBACK.encode(text).ids
    expected = f" {text}".encode() if text else b""
    assert b"".join(map(vocabulary.token_bytes, ids)) == expected


def test_every_byte_has_a_token_of_its_own():
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        vocabulary = Vocabulary(tokenizer)
        texts = {vocabulary.token_bytes(each) for each in range(tokenizer.get_vocab_size())}
        assert {bytes((byte,)) for byte in range(256)} <= texts


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing():
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        vocabulary = Vocabulary(tokenizer)
        assert tuple(vocabulary.token_bytes(each).decode() for each in (0, 1)) == SPECIAL_TOKENS
        assert vocabulary.token_bytes(10_000) == b""


def test_a_byte_level_vocabulary_may_have_tokens_outside_its_alphabet():
    tokenizer = Tokenizer(models.WordLevel({"\u2581x": 0, "ab": 1}, unk_token="ab"))
    tokenizer.decoder = decoders.ByteLevel()
    assert Vocabulary(tokenizer).token_bytes(0) == "\u2581x".encode()
    assert Vocabulary(tokenizer).token_bytes(1) == b"ab"


def test_a_tokenizer_without_a_decoder_has_its_tokens_as_they_are():
    tokenizer = Tokenizer(models.WordLevel({"<0x41>": 0, "b": 1}, unk_token="b"))
    assert Vocabulary(tokenizer).token_bytes(0) == b"<0x41>"
