"""Which tokens an answer shows beside its text: each with the piece of text that it is part of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from deployments.openai.answer import Candidate, TokenEntry
from kv_transfer.logprobs import TokenLogprobs

__all__ = ["TokenAligner", "prompt_entries", "token_entry"]


def token_entry(
    token_id: int,
    logprobs: TokenLogprobs | None,
    *,
    offset: int,
    num_top: int,
    token_bytes: Callable[[int], bytes],
) -> TokenEntry:
    """A token with the first num_top of its alternatives; offset is its text's place."""
    top = () if logprobs is None else logprobs.top[:num_top]
    return TokenEntry(
        token=Candidate(
            token_id=token_id,
            data=token_bytes(token_id),
            logprob=None if logprobs is None else logprobs.logprob,
            rank=0 if logprobs is None else logprobs.rank,
        ),
        top=tuple(
            Candidate(token_id=each, data=token_bytes(each), logprob=logprob, rank=rank)
            for rank, (each, logprob) in enumerate(top, start=1)
        ),
        offset=offset,
    )


class TokenAligner:
    """Gives out the tokens of one sequence with the text that they are part of.

    A piece of text may be of several tokens (of one character), and may wait for what comes after
    it (the rest of a stop string); its tokens wait with it. Of a text that a stop string ends, the
    tokens are given that begin before its end.
    """

    def __init__(self, *, offset: int, num_top: int, token_bytes: Callable[[int], bytes]) -> None:
        """`offset` is the place of the first token's text."""
        self._num_top = num_top
        self._token_bytes = token_bytes
        self._pending: list[TokenEntry] = []
        """Tokens whose text is not whole yet."""
        self._held: deque[TokenEntry] = deque()
        """Tokens whose text waits, by rising offset."""
        self._end = offset
        """Where the last piece ends."""
        self._given = offset
        """Where the text that was given out ends."""

    def add(self, token_id: int, logprobs: TokenLogprobs, piece: str) -> None:
        """The next token, and the text that became whole with it."""
        self._pending.append(
            token_entry(
                token_id,
                logprobs,
                offset=self._end,
                num_top=self._num_top,
                token_bytes=self._token_bytes,
            )
        )
        self.complete(piece)

    def complete(self, piece: str) -> None:
        """The text of the pending tokens, if it is whole."""
        if piece:
            self._held += self._pending
            self._pending = []
            self._end += len(piece)

    def take(self, text: str) -> tuple[TokenEntry, ...]:
        """The tokens of a text that is given out now."""
        self._given += len(text)
        taken = []
        while self._held and self._held[0].offset < self._given:
            taken.append(self._held.popleft())
        return tuple(taken)

    def rest(self) -> tuple[TokenEntry, ...]:
        """The tokens that are left at the end, without a text of their own."""
        return (*self._held, *self._pending)


def prompt_entries(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    text: str,
    num_top: int,
    token_bytes: Callable[[int], bytes],
) -> tuple[TokenEntry, ...]:
    """Each token of a prompt with that text; `logprobs` are those of all but the first."""
    offsets = _offsets(text, [token_bytes(token_id) for token_id in token_ids])
    return tuple(
        token_entry(token_id, each, offset=offset, num_top=num_top, token_bytes=token_bytes)
        for token_id, each, offset in zip(token_ids, (None, *logprobs), offsets, strict=True)
    )


def _offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where in the text each piece begins, in characters.

    A piece that is not the next part of the text is one that the tokenizer added or changed (a
    start token, a first space): it is put where the text has come to, and takes nothing of it.
    """
    data = text.encode("utf-8", "surrogatepass")
    offsets, at, characters = [], 0, 0
    for piece in pieces:
        offsets.append(characters)
        if at == 0 and not data.startswith(piece):
            piece = piece.removeprefix(b" ")
        if data.startswith(piece, at):
            at += len(piece)
            # Bytes that continue a character do not count: it began with an earlier byte.
            characters += sum(byte & 0xC0 != 0x80 for byte in piece)
    return offsets
