"""What a parity session has compared is kept, put together and judged."""

from __future__ import annotations

import pytest

from tests.parity.ledger import TIE, Ledger
from tests.parity.references import Reference


def reference(gap: float) -> Reference:
    return Reference(prompt=(1, 2, 3), tokens=(7, 8), gaps=(1.0, gap))


def compared(num_prompts: int, *, ties: int = 0, mode: str = "split") -> Ledger:
    """Of that many prompts so many have another second token."""
    ledger = Ledger()
    answers = [(7, 9)] * ties + [(7, 8)] * (num_prompts - ties)
    wrong = ledger.compare("llama", mode, [reference(TIE / 2)] * num_prompts, answers)
    assert wrong == []
    return ledger


def test_a_difference_beyond_a_tie_is_told_at_once():
    (wrong,) = Ledger().compare("llama", "split", [reference(TIE)], [(7, 9)])
    assert (wrong.position, wrong.is_tie) == (1, False)


def test_ledgers_of_two_processes_make_one():
    whole = compared(3, ties=1)
    for other in (compared(4, ties=1), compared(5, mode="chunked")):
        whole.merge(Ledger.from_json(other.to_json()))

    assert whole.prompts == 12
    assert len(whole.ties) == 2
    assert whole.cells["llama", "split"].tokens == 14
    text = "\n".join(whole.lines())
    assert "5/7 2 tie" in text
    assert "5/5" in text
    assert "12 prompts and 24 tokens compared" in text


@pytest.mark.parametrize(
    ("prompts", "ties", "too_many"),
    [(2, 1, False), (2, 2, True), (400, 2, False), (400, 3, True)],
)
def test_ties_may_be_one_prompt_or_one_in_two_hundred(prompts, ties, too_many):
    ledger = compared(prompts, ties=ties)
    assert ledger.has_too_many_ties is too_many
    assert ("TOO MANY" in "\n".join(ledger.lines())) is too_many
