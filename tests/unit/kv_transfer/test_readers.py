"""Blocks that several transfers read are free when all of them have ended, and not before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff import ReleaseReason
from kv_transfer.readers import Readers
from tests.fakes.block_memory import transfer_key

A, B, C = (transfer_key(name) for name in "abc")
CONFIRMED, EXPIRED = ReleaseReason.CONFIRMED, ReleaseReason.EXPIRED


def test_a_transfer_of_its_own_frees_its_blocks_at_once():
    readers = Readers()
    readers.begin([A])
    assert readers.end(A, CONFIRMED) == ((A, CONFIRMED),)


def test_a_confirm_of_one_frees_nothing_that_another_reads():
    readers = Readers()
    readers.begin([A, B])
    assert readers.end(B, CONFIRMED) == ()
    readers.check_invariants()
    assert readers.end(A, EXPIRED) == ((B, CONFIRMED), (A, EXPIRED))


@pytest.mark.parametrize("keys", [[A, A], [C, B]])
def test_nobody_reads_twice(keys):
    readers = Readers()
    readers.begin([A, B])
    with pytest.raises(ValueError, match="twice"):
        readers.begin(keys)
    assert readers.end(A, CONFIRMED) == ()
    assert len(readers.end(B, CONFIRMED)) == 2
    with pytest.raises(KeyError):
        readers.end(C, CONFIRMED)


def test_check_invariants_sees_a_group_that_does_not_know_its_reader():
    readers = Readers()
    readers.begin([A])
    readers._group_of[A].reading.clear()
    with pytest.raises(AssertionError, match="does not know"):
        readers.check_invariants()


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_each_group_is_told_once_and_whole_with_its_last_end(sizes, data):
    readers = Readers()
    groups = [[transfer_key(f"{g}-{i}") for i in range(size)] for g, size in enumerate(sizes)]
    for group in groups:
        readers.begin(group)
    order = data.draw(st.permutations([key for group in groups for key in group]))
    ended: set[object] = set()
    for key in order:
        reason = data.draw(st.sampled_from(ReleaseReason))
        freed = readers.end(key, reason)
        readers.check_invariants()
        ended.add(key)
        (group,) = (group for group in groups if key in group)
        expected = set(group) if ended.issuperset(group) else set()
        assert {freed_key for freed_key, _ in freed} == expected
        assert not freed or freed[-1] == (key, reason)
        assert len(freed) == len(expected)
