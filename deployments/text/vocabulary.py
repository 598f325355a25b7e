"""The text of single tokens, to the byte: what a decoder of whole texts cannot give."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

__all__ = ["Vocabulary"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "\u2581"
"""What SentencePiece vocabularies write for a space."""


class Vocabulary:
    """A tokenizer's vocabulary, read as its own decoder would read it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        kinds = set(_decoder_kinds(json.loads(tokenizer.to_str())["decoder"]))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._byte_of = {character: byte for byte, character in _byte_level_alphabet().items()}

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 text of a token, its own first space included; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return self._bytes_of_level(token)
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        return token.replace(_METASPACE, " ").encode()

    def _bytes_of_level(self, token: str) -> bytes:
        if not all(character in self._byte_of for character in token):
            return token.encode()
        return bytes(self._byte_of[character] for character in token)


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    """The types of a decoder and of those that it is made of."""
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


def _byte_level_alphabet() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies, as GPT-2 chose them.

    Bytes that print in Latin-1 stand for themselves, the others for the characters from 256 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {byte: chr(byte) for byte in printing} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
