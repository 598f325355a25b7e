"""The seeded-bug table in docs/kv-handoff.md, made from the patches and from the model's mistakes.

`python -m tests.mutants.table` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutants.run import PATCHES, REPOSITORY, Mutant
from tests.verify.check import MUTANTS

DOCUMENT = REPOSITORY / "docs" / "kv-handoff.md"
BEGIN = "<!-- seeded bugs, from the patches: python -m tests.mutants.table -->"
END = "<!-- end of seeded bugs -->"


def table(patches: Path = PATCHES) -> str:
    """A row for each mistake, with what must see it."""
    in_code = [Mutant.read(patch) for patch in sorted(patches.glob("*.patch"))]
    rows = [
        *(_row("code", mutant.story, _tests(mutant)) for mutant in in_code),
        *(
            _row("model", mutant.name.replace("_", " ").lower(), mutant.breaks)
            for mutant in MUTANTS
        ),
    ]
    return "\n".join((_row("in", "mistake", "seen by"), _row("---", "---", "---"), *rows))


def with_table(text: str) -> str:
    """The document with its table as it is to be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _tests(mutant: Mutant) -> str:
    return ", ".join(f"`{test}`" for test in mutant.tests)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text("utf-8")), "utf-8")
