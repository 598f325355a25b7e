"""Token ids to text as they come: whole characters only, and in sum the text of all ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not, or not yet, a character."""


class Detokenizer:
    """The text of one sequence, a token at a time.

    A token's text depends on its neighbours (a character may lie across several tokens, a decoder
    may drop the first space), so each is decoded together with the tokens of the piece before: the
    two decodes differ by exactly the new text. A text that ends in U+FFFD waits for the next token;
    `flush` gives it out as it is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        """Context, then the tokens whose text has not been given out."""
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that became certain, often of several tokens."""
        self._token_ids.append(token_id)
        text = self._pending_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._token_ids = self._token_ids[self._num_context :]
        self._num_context = len(self._token_ids)
        self._context_text = self._decode(self._token_ids)
        return text

    def flush(self) -> str:
        """The rest of the text when no more tokens come; the object is used up."""
        text = self._pending_text()
        self._token_ids = []
        self._num_context = 0
        self._context_text = ""
        return text

    def _pending_text(self) -> str:
        text = self._decode(self._token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # Only ill-formed bytes of a byte-fallback vocabulary change the text before them: what has
        # been given out stands, and the new tokens are read alone.
        return self._decode(self._token_ids[self._num_context :])
