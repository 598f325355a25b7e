"""Which tokens a sequence has, and how often its output has each: what penalties ask for.

Counted as tokens come, so that a step of a sequence of n tokens need not look at n tokens; kept
only for sequences whose sampling has penalties.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SeenTokens", "TokenCounts"]

_INT64 = "q"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTokens:
    """The counts at one moment; two arrays of int64 in the machine's order, equally long."""

    ids: bytes
    """Each token id of prompt and output, once."""
    output_counts: bytes
    """How often the output has each of them; 0 for one that only the prompt has."""


class TokenCounts:
    """The counts of one sequence; its owner adds each output token."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._ids = array(_INT64, dict.fromkeys(prompt_token_ids))
        self._output_counts = array(_INT64, [0]) * len(self._ids)
        self._places = {token_id: place for place, token_id in enumerate(self._ids)}

    def add(self, token_id: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._output_counts.append(0)
        self._output_counts[place] += 1

    def seen(self) -> SeenTokens:
        """A copy that no later token changes."""
        return SeenTokens(ids=self._ids.tobytes(), output_counts=self._output_counts.tobytes())
