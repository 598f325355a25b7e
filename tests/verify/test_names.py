"""The model's states are those of the code, name by name."""

from __future__ import annotations

from enum import Enum

import pytest

from kv_transfer.lease import LeaseState
from kv_transfer.protocol import TransferState
from tests.verify.model import MODEL, names_of
from workers.engine.block_pool import BlockState
from workers.engine.sequence import SequenceStatus

NOT_MODELLED = {
    "B_CACHED": "a block that nobody holds: it is given up before it is reserved again, like FREE",
}


@pytest.mark.parametrize(
    ("kind", "letter", "states"),
    [
        ("transfer", "T", TransferState),
        ("lease", "L", LeaseState),
        ("status", "S", SequenceStatus),
        ("block", "B", BlockState),
    ],
)
def test_model_names_every_state_of_the_code_and_no_other(
    kind: str, letter: str, states: type[Enum]
):
    of_code = {f"{letter}_{state.name}" for state in states}

    assert set(names_of(kind)) == of_code - NOT_MODELLED.keys()


def test_model_checks_invariants_that_have_a_row():
    table = (MODEL.parents[1] / "INVARIANTS.md").read_text("utf-8")

    for name in names_of("invariant"):
        assert f"| {name.replace('_', '-')} |" in table
