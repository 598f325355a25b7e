"""What a run has compared, and the table of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.parity.references import Reference

__all__ = ["TIE", "Cell", "Difference", "Ledger"]

TIE = 1e-3
"""The reference's two likeliest logits may change places by rounding if they are closer."""

TIES_ALLOWED = 0.005
"""Of all prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A prompt whose tokens are not the reference's."""

    subject: str
    mode: str
    prompt_tokens: int
    position: int
    """Of the first token that differs."""
    gap: float
    """Between the reference's two likeliest logits there."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < TIE

    def __str__(self) -> str:
        return (
            f"{self.subject}, {self.mode}: a prompt of {self.prompt_tokens} tokens differs from "
            f"output token {self.position} on, where the logit gap is {self.gap:.2e}"
        )


@dataclass(slots=True, kw_only=True)
class Cell:
    """One model in one mode."""

    prompts: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """All comparisons of a session."""

    cells: dict[tuple[str, str], Cell] = field(default_factory=lambda: defaultdict(Cell))

    def compare(
        self,
        subject: str,
        mode: str,
        references: Sequence[Reference],
        generated: Sequence[Sequence[int]],
    ) -> list[Difference]:
        """Enter a model's tokens; returns the differences that no tie explains."""
        cell = self.cells[subject, mode]
        wrong = []
        for reference, tokens in zip(references, generated, strict=True):
            cell.prompts += 1
            cell.tokens += len(reference.tokens)
            difference = _difference(subject, mode, reference, tokens)
            if difference is not None:
                cell.differences.append(difference)
                if not difference.is_tie:
                    wrong.append(difference)
        return wrong

    @property
    def prompts(self) -> int:
        """Comparisons made, a prompt in a mode each."""
        return sum(cell.prompts for cell in self.cells.values())

    @property
    def has_too_many_ties(self) -> bool:
        """Whether the share of prompts that differ at all is beyond what rounding may do."""
        # One in a small sample says nothing about its share.
        return len(self.ties) > max(1, TIES_ALLOWED * self.prompts)

    def merge(self, other: Ledger) -> None:
        """Enter what another session has compared."""
        for key, theirs in other.cells.items():
            cell = self.cells[key]
            cell.prompts += theirs.prompts
            cell.tokens += theirs.tokens
            cell.differences += theirs.differences

    def to_json(self) -> str:
        """For `from_json`, in another process."""
        return json.dumps([[*key, asdict(cell)] for key, cell in self.cells.items()])

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Inverse of `to_json`."""
        ledger = cls()
        for subject, mode, cell in json.loads(text):
            differences = [Difference(**found) for found in cell.pop("differences")]
            ledger.cells[subject, mode] = Cell(**cell, differences=differences)
        return ledger

    @property
    def ties(self) -> list[Difference]:
        """Differences that rounding explains."""
        return [item for cell in self.cells.values() for item in cell.differences if item.is_tie]

    def lines(self) -> list[str]:
        """The table, models by modes (prompts, ties and wrong ones where there are any)."""
        subjects = list(dict.fromkeys(subject for subject, _ in self.cells))
        modes = list(dict.fromkeys(mode for _, mode in self.cells))
        width = max(len("model"), *map(len, subjects)) + 2
        lines = ["model".ljust(width) + "".join(mode.rjust(14) for mode in modes)]
        for subject in subjects:
            found = [_summary(self.cells.get((subject, mode))) for mode in modes]
            lines.append(subject.ljust(width) + "".join(text.rjust(14) for text in found))
        tokens = sum(cell.tokens for cell in self.cells.values())
        judgement = ": TOO MANY" if self.has_too_many_ties else ""
        lines.append(
            f"{self.prompts} prompts and {tokens} tokens compared; {len(self.ties)} prompts differ "
            f"by a tie (the reference's logit gap is below {TIE}){judgement}"
        )
        return lines + [
            str(difference) for cell in self.cells.values() for difference in cell.differences
        ]


def _difference(
    subject: str, mode: str, reference: Reference, tokens: Sequence[int]
) -> Difference | None:
    if len(tokens) != len(reference.tokens):
        raise AssertionError(f"{len(tokens)} tokens instead of {len(reference.tokens)}")
    for position, (token, expected) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if token != expected:
            return Difference(
                subject=subject,
                mode=mode,
                prompt_tokens=len(reference.prompt),
                position=position,
                gap=reference.gaps[position],
            )
    return None


def _summary(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    ties = sum(difference.is_tie for difference in cell.differences)
    wrong = len(cell.differences) - ties
    text = f"{cell.prompts - ties - wrong}/{cell.prompts}"
    if ties:
        text += f" {ties} tie"
    if wrong:
        text += f" {wrong} WRONG"
    return text
