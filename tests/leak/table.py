"""The tables of guards in docs/kv-handoff.md, made from the scenes that the tests play.

`python -m tests.leak.table` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

from tests.leak.scenes import SCENES, Scene

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kv-handoff.md"
BEGIN = "<!-- guards, from the tests: python -m tests.leak.table -->"
END = "<!-- end of guards -->"


def tables() -> str:
    """A row for each guard of each scene, in the order in which they are met."""
    return "\n\n".join(f"{scene.story}\n\n{_table(scene)}" for scene in SCENES)


def with_table(text: str) -> str:
    """The document with its tables as they are to be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(scene: Scene) -> str:
    rows = ["| | guard | where | without it and those above |", "| --- | --- | --- | --- |"]
    for number, guard in enumerate(scene.chain, 1):
        following = f"{number + 1} refuses" if number < len(scene.chain) else "**the leak**"
        rows.append(f"| {number} | {guard.what} | `{guard.where}` | {following} |")
    return "\n".join(rows)


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text("utf-8")), "utf-8")
