"""The model's tokenizer, by the `tokenizers` library alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from deployments.text.vocabulary import Vocabulary

__all__ = ["TextTokenizer"]

_INLINE_CHARACTERS = 2048
"""Longer texts are encoded in the executor: on the loop they would hold up every stream (about
1 us per 4 characters)."""


class TextTokenizer:
    """Encodes prompts and decodes output; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, executor: Executor) -> None:
        # A file may carry limits for training batches: a prompt is never cut or padded in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._executor = executor
        self._vocabulary = Vocabulary(tokenizer)

    @classmethod
    def from_directory(cls, directory: Path, executor: Executor) -> Self:
        """Load `tokenizer.json`; the executor encodes long texts and belongs to the caller."""
        return cls(Tokenizer.from_file(str(directory / "tokenizer.json")), executor)

    @property
    def vocab_size(self) -> int:
        """Ids below it have a text, added tokens included; the model's own may be larger."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; with add_special_tokens the model's own start tokens are added."""
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a text are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own text in UTF-8, special or not; part of a character for some."""
        return self._vocabulary.token_bytes(token_id)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
