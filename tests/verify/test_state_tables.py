"""The documentation's tables of states are those of the code."""

from __future__ import annotations

from tests.verify.state_tables import BEGIN, DOCUMENT, with_tables


def test_documented_states_are_those_of_the_code():
    text = DOCUMENT.read_text("utf-8")

    assert with_tables(text) == text, "run: python -m tests.verify.state_tables"


def test_a_table_that_is_not_of_the_code_is_reported():
    text = DOCUMENT.read_text("utf-8")
    planted = text.replace(f"{BEGIN}\n", f"{BEGIN}\n| RESERVED | Begin: PUBLISHED |\n")

    assert planted != text
    assert with_tables(planted) == text
