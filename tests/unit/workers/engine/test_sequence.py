import pytest

from tests.fakes.scheduling import make_spec
from workers.engine.sequence import (
    TERMINAL,
    TRANSITIONS,
    IllegalTransitionError,
    Sequence,
    SequenceMode,
    SequenceStatus,
)


def test_every_state_has_a_row_of_transitions():
    assert set(TRANSITIONS) == set(SequenceStatus)


def test_terminal_states_are_exactly_those_that_nothing_leaves():
    assert {status for status, onward in TRANSITIONS.items() if not onward} == TERMINAL


def test_every_live_state_can_be_cancelled_and_can_fail():
    for status in set(SequenceStatus) - TERMINAL:
        assert {SequenceStatus.ABORTED, SequenceStatus.FAILED} <= TRANSITIONS[status]


def test_every_state_can_be_reached_from_waiting():
    reached = {SequenceStatus.WAITING}
    while (more := reached.union(*(TRANSITIONS[status] for status in reached))) != reached:
        reached = more
    assert reached == set(SequenceStatus)


def test_quarantine_leads_to_no_computation_without_the_fence():
    onward = TRANSITIONS[SequenceStatus.QUARANTINED]
    assert onward.isdisjoint({SequenceStatus.PREFILLING, SequenceStatus.DECODING})


def test_move_to_refuses_what_the_table_lacks_and_changes_nothing():
    sequence = Sequence.from_spec(make_spec(3))
    with pytest.raises(IllegalTransitionError, match=r"sequence 3 is waiting: .* become decoding"):
        sequence.move_to(SequenceStatus.DECODING)
    assert sequence.status is SequenceStatus.WAITING


def test_reserved_tokens_are_prompt_and_output():
    assert make_spec(prompt=5, max_tokens=7).num_reserved_tokens == 12


def test_reserved_tokens_of_prefill_only_are_the_prompt():
    spec = make_spec(prompt=5, max_tokens=7, mode=SequenceMode.PREFILL_ONLY)
    assert spec.num_reserved_tokens == 5


def test_output_tokens_are_those_after_the_prompt():
    sequence = Sequence.from_spec(make_spec(prompt=5))
    sequence.token_ids.extend([7, 8])
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (5, 2)
