"""`make verify`: every state of the model within bounds, and a planted mistake for each property.

With `--all` within larger bounds too, which takes a quarter of an hour and 5 GB: all searches run
side by side.

Exits with 1 if a property fails, or if a planted mistake is not found by the property that is to
find it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.verify.model import RELEASE, Bounds, Outcome, SpinError, search

INVARIANTS = "INV-COVER, INV-FENCE, INV-GEN, INV-CONSERVE"
SMALL = Bounds(attempts=1, crashes=0)
RETRY = Bounds(attempts=2, crashes=0)
RESTART = Bounds(attempts=1, crashes=1)
LARGE = Bounds(attempts=2, crashes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Properties that must hold in every state within the bounds."""

    properties: str
    bounds: Bounds

    def run(self) -> Outcome:
        """Search every state."""
        return search(self.bounds, release=self.properties == RELEASE)

    def row(self, outcome: Outcome) -> tuple[str, bool]:
        """The line for the table, and whether it is as it must be."""
        verdict = "holds" if outcome.violated is None else f"FAILS: {outcome.violated}"
        cells = (self.properties, self.bounds, f"{outcome.states:,}", f"{outcome.seconds:.0f}")
        return _line(*cells, verdict), outcome.violated is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted mistake and the property that it must break."""

    name: str
    breaks: str
    """Either of several, where the search may come to each of them first."""
    bounds: Bounds = SMALL

    def run(self) -> Outcome:
        """Search until a property fails."""
        return search(self.bounds, release=self.breaks == RELEASE, mutant=self.name)

    def row(self, outcome: Outcome) -> tuple[str, bool]:
        """The line for the table, and whether it is as it must be."""
        is_found = outcome.violated is not None and outcome.violated in self.breaks.split(" or ")
        verdict = f"found by {outcome.violated}" if is_found else f"MISSED: {outcome.violated}"
        return _line(self.name, self.breaks, f"{outcome.states:,}", verdict), is_found


PROOFS = (
    Proof(properties=RELEASE, bounds=RESTART),
    Proof(properties=RELEASE, bounds=RETRY),
    Proof(properties=INVARIANTS, bounds=RETRY),
    Proof(properties=INVARIANTS, bounds=RESTART),
)
LARGE_PROOFS = (
    Proof(properties=RELEASE, bounds=LARGE),
    Proof(properties=INVARIANTS, bounds=LARGE),
)
MUTANTS = (
    Mutant(name="DROP_CONFIRM", breaks="INV-COVER"),
    Mutant(name="IGNORE_GENERATION", breaks="INV-GEN"),
    Mutant(name="KEEP_GENERATION", breaks="INV-GEN"),
    Mutant(name="REUSE_BEFORE_FENCE", breaks="INV-FENCE"),
    Mutant(name="FREE_ON_FIRST_SIBLING_ERROR", breaks="INV-FENCE"),
    Mutant(name="COUNT_NOTIFICATIONS", breaks="INV-COVER or INV-FENCE"),
    Mutant(name="TRIM_BY_POSITION", breaks="INV-COVER"),
    Mutant(name="RENEW_AFTER_EXPIRY", breaks="INV-COVER"),
    Mutant(name="IGNORE_INCARNATION", breaks="INV-COVER", bounds=RESTART),
    Mutant(name="IGNORE_EPOCH", breaks="INV-COVER", bounds=RETRY),
    Mutant(name="RELEASE_TWICE", breaks="INV-CONSERVE"),
    Mutant(name="NO_SWEEP", breaks=RELEASE),
    Mutant(name="NO_DEADLINE", breaks=RELEASE),
)


def main(*, is_large: bool = False) -> int:
    """Print both tables; 1 if anything in them is not as it must be."""
    asked = (*PROOFS, *(LARGE_PROOFS if is_large else ()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        proofs = pool.map(Proof.run, asked)
        mutants = pool.map(Mutant.run, MUTANTS)
        headings = (
            ("property", "bounds", "states", "seconds", ""),
            ("planted mistake", "must break", "states until found", ""),
        )
        rows = map(Proof.row, asked, proofs), map(Mutant.row, MUTANTS, mutants)
        are_right = [_show(*table) for table in zip(headings, rows, strict=True)]
    return 0 if all(are_right) else 1


def _show(heading: tuple[str, ...], rows: Iterable[tuple[str, bool]]) -> bool:
    """Print a table, each row as soon as it is known; whether all of them are right."""
    print(_line(*heading))
    print(_line(*("---" for _ in heading)))
    is_right = True
    for line, is_row_right in rows:
        print(line, flush=True)
        is_right &= is_row_right
    print()
    return is_right


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    try:
        sys.exit(main(is_large="--all" in sys.argv[1:]))
    except SpinError as error:
        sys.exit(f"verify: {error}")
