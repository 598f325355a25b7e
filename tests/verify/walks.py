"""Walks through the model: what happened, and what the model's state was after it.

A recorded walk, in `walks/`, has one line per event: its name and numbers, then what it changed.
`python -m tests.verify.walks` records them anew, after a change of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.verify.model import names_of, walk

WALKS = Path(__file__).with_name("walks")

FIELDS = {
    "DECODE": (
        *("d_seq0", "d_seq1", "pull0", "pull1"),
        *("landed0", "landed1", "landed2", "d_block0", "d_block1"),
    ),
    "PREFILL": (
        *("p_seq0", "p_seq1", "lease0", "lease1"),
        *("granted0", "granted1", "p_block0", "p_block1", "incarnation"),
    ),
}
"""What the model prints after each event, in this order."""

START: Mapping[str, str] = {name: "0" for line in FIELDS.values() for name in line} | {
    "d_seq0": "S_WAITING",
    "d_seq1": "S_WAITING",
    "d_block0": "B_FREE",
    "d_block1": "B_FREE",
    "p_block0": "B_FREE",
    "p_block1": "B_FREE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One event of the model and the whole state after it."""

    event: str
    numbers: tuple[int, ...]
    state: Mapping[str, str]


def parse(printed: str) -> Iterator[Step]:
    """The steps of a walk as spin prints it; one that was cut off within a step ends before it."""
    lines = [line.split() for line in printed.splitlines()]
    lines = [words for words in lines if words and words[0] in ("EVENT", "DECODE", "PREFILL")]
    for event, *parts in zip(lines[::3], lines[1::3], lines[2::3], strict=False):
        state = {
            name: value
            for (kind, *values) in parts
            for name, value in zip(FIELDS[kind], values, strict=True)
        }
        yield Step(event=event[1], numbers=tuple(map(int, event[2:])), state=state)


def compact(steps: Iterable[Step]) -> str:
    """A line for each step that says what it changed."""
    lines, before = [], START
    for step in steps:
        changes = (f"{name}={value}" for name, value in step.state.items() if before[name] != value)
        lines.append(" ".join((step.event, *map(str, step.numbers), *changes)))
        before = step.state
    return "\n".join(lines) + "\n"


def expand(text: str) -> Iterator[Step]:
    """The steps of a recorded walk."""
    state = dict(START)
    for line in text.splitlines():
        event, *words = line.split()
        state |= dict(word.split("=") for word in words if "=" in word)
        numbers = tuple(int(word) for word in words if "=" not in word)
        yield Step(event=event, numbers=numbers, state=dict(state))


def record(seeds: Iterable[int]) -> None:
    """Keep the walks that show an event or a state that those before did not, until all are."""
    missing = {
        name
        for kind in ("event", "transfer", "lease", "status", "block")
        for name in names_of(kind)
    }
    missing -= NEVER_AT_REST
    WALKS.mkdir(exist_ok=True)
    for old in WALKS.glob("*.txt"):
        old.unlink()
    for seed in seeds:
        steps = list(parse(walk(seed)))
        seen = {step.event for step in steps} | {v for step in steps for v in step.state.values()}
        if missing & seen:
            missing -= seen
            (WALKS / f"{seed:04}.txt").write_text(compact(steps), "utf-8")
        if not missing:
            return
    raise SystemExit(f"no walk shows {sorted(missing)}")


NEVER_AT_REST = {"T_FREE"}
"""A transfer whose blocks are free again is gone within the same action."""


if __name__ == "__main__":
    record(range(1, 2000))
