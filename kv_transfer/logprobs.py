"""Log-probabilities of tokens: the values that travel from prefill to decode, and their bytes.

Numbers are those of fp32, so that a trip over the wire changes none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TokenLogprobs", "pack_logprobs", "unpack_logprobs"]

_COUNT = struct.Struct("!I")
_TOKEN = struct.Struct("!fII")
_ALTERNATIVE = struct.Struct("!If")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely the token at one position was, and what else was likely there.

    Of the model's own distribution: before bias, penalties, temperature and filters.
    """

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """1 for the likeliest token of the vocabulary; equally likely ones share the better rank."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, the likeliest first; as many as asked for."""


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    """The positions in order, as bytes; 12 of them a position and 8 an alternative."""
    parts = [_COUNT.pack(len(logprobs))]
    for token in logprobs:
        parts.append(_TOKEN.pack(token.logprob, token.rank, len(token.top)))
        parts += [_ALTERNATIVE.pack(token_id, logprob) for token_id, logprob in token.top]
    return b"".join(parts)


def unpack_logprobs(payload: bytes) -> tuple[TokenLogprobs, ...]:
    """Inverse of `pack_logprobs`; ValueError unless the payload is exactly what it says it is."""
    try:
        (count,) = _COUNT.unpack_from(payload)
        place, logprobs = _COUNT.size, []
        for _ in range(count):
            logprob, rank, num_top = _TOKEN.unpack_from(payload, place)
            place += _TOKEN.size
            end = place + num_top * _ALTERNATIVE.size
            top = tuple(_ALTERNATIVE.iter_unpack(payload[place:end]))
            if len(top) != num_top:
                raise ValueError(f"{num_top} alternatives announced, {len(top)} there")
            logprobs.append(TokenLogprobs(logprob=logprob, rank=rank, top=top))
            place = end
    except struct.error as error:
        raise ValueError(f"log-probabilities of {len(payload)} bytes are cut") from error
    if place != len(payload):
        raise ValueError(f"log-probabilities end at byte {place} of {len(payload)}")
    return tuple(logprobs)
