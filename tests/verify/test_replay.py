"""The real classes go through the same states as the model, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.verify.model import has_spin, names_of, spin_version, walk
from tests.verify.replay import Replay, expected
from tests.verify.walks import NEVER_AT_REST, WALKS, Step, compact, expand, parse

RECORDED = sorted(WALKS.glob("*.txt"))

RECORDED_BY = "6.5.2"

needs_spin = pytest.mark.skipif(not has_spin(), reason="spin or gcc is not installed")


def follow(steps: Iterable[Step]) -> int:
    """Replay a walk, comparing after each event; returns how many there were."""
    replay, done = Replay(), []
    for step in steps:
        done.append(f"{step.event} {step.numbers}")
        replay.take(step)
        assert replay.seen() == expected(step.state), f"after {done}"
    return len(done)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_classes_follow_a_recorded_walk(path: Path):
    assert follow(expand(path.read_text("utf-8"))) > 0


def test_recorded_walks_show_every_event_and_state():
    steps = [step for path in RECORDED for step in expand(path.read_text("utf-8"))]
    seen = {step.event for step in steps} | {v for step in steps for v in step.state.values()}

    for kind in ("event", "transfer", "lease", "status", "block"):
        assert set(names_of(kind)) - NEVER_AT_REST <= seen


def test_a_walk_that_the_classes_do_not_follow_is_reported():
    steps = list(expand(RECORDED[0].read_text("utf-8")))
    steps[0] = Step(
        event=steps[0].event,
        numbers=steps[0].numbers,
        state={**steps[0].state, "lease0": "L_GRANTED"},
    )

    with pytest.raises(AssertionError, match="L_GRANTED"):
        follow(steps)


@needs_spin
@pytest.mark.skipif(spin_version() != RECORDED_BY, reason="another spin draws other numbers")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_walk_is_one_of_the_model_as_it_is(path: Path):
    assert compact(parse(walk(int(path.stem)))) == path.read_text("utf-8")


@needs_spin
def test_classes_follow_walks_that_nobody_has_seen():
    for seed in range(5000, 5030):
        assert follow(parse(walk(seed))) > 0, f"seed {seed}"
