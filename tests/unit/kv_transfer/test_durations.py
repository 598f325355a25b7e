"""Durations between bounds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.durations import HANDOFF_BOUNDS_S, Durations


def test_a_bound_includes_what_took_exactly_so_long():
    durations = Durations((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        durations.observe(seconds)
    counts = durations.counts()
    assert counts.counts == (2, 2, 2)
    assert list(counts.cumulative()) == [(1.0, 2), (2.0, 4), (math.inf, 6)]
    assert counts.total_s == 16.5


def test_a_snapshot_stays_as_it_is():
    durations = Durations((1.0,))
    before = durations.counts()
    durations.observe(0.1)
    assert list(before.cumulative()) == [(1.0, 0), (math.inf, 0)]


@given(st.lists(st.floats(min_value=0.0, max_value=1000.0)))
def test_every_duration_is_counted_once_and_below_its_bounds(seconds):
    durations = Durations(HANDOFF_BOUNDS_S)
    for one in seconds:
        durations.observe(one)
    for bound, count in durations.counts().cumulative():
        assert count == sum(one <= bound for one in seconds)
