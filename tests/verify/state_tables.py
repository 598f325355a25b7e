"""The tables of states in docs/kv-handoff.md, made from the code's own.

`python -m tests.verify.state_tables` writes them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

from kv_transfer import lease, protocol

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kv-handoff.md"
BEGIN = "<!-- states, from the code: python -m tests.verify.state_tables -->"
END = "<!-- end of states -->"


def tables() -> str:
    """Both state machines, a row for each state."""
    transfer = {
        state: {event.__name__: following for event, following in events.items()}
        for state, events in protocol.TRANSITIONS.items()
    }
    leases = {
        state: {event.name: {following} for event, following in events.items()}
        for state, events in lease.TRANSITIONS.items()
    }
    return "\n\n".join(
        (
            "Decode's side, `kv_transfer/protocol.py`:",
            _table(transfer),
            "Prefill's side, `kv_transfer/lease.py`:",
            _table(leases),
        )
    )


def with_tables(text: str) -> str:
    """The document with its tables as they are to be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(transitions: Mapping[Enum, Mapping[str, Iterable[Enum]]]) -> str:
    rows = ["| state | event: state after it |", "| --- | --- |"]
    for state, events in transitions.items():
        moves = (f"{event}: {_names(following)}" for event, following in events.items())
        rows.append(f"| {state.name} | {'; '.join(moves) or 'the end'} |")
    return "\n".join(rows)


def _names(states: Iterable[Enum]) -> str:
    return " or ".join(sorted(state.name for state in states))


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text("utf-8")), "utf-8")
