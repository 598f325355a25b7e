"""Averages that forget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.fading import FadingLine, FadingRatio

counts = st.integers(min_value=0, max_value=300)
seconds = st.floats(min_value=0.0, max_value=100.0)


def line_of(*points: tuple[float, float], half_life: float = 32.0) -> FadingLine:
    line = FadingLine(half_life=half_life)
    for x, y in points:
        line.observe(x, y)
    return line


def test_nothing_observed_is_not_known():
    assert FadingRatio(half_life=10.0).value is None
    assert line_of().at(3.0) is None


def test_ratio_is_the_mean_by_weight():
    ratio = FadingRatio(half_life=1e9)
    ratio.observe(2.0, 10.0)
    ratio.observe(1.0, 5.0)
    assert ratio.value == pytest.approx(0.2)


def test_weight_of_nothing_changes_nothing():
    ratio = FadingRatio(half_life=10.0)
    ratio.observe(0.0, 0.0)
    assert ratio.value is None


def test_after_a_half_life_the_past_counts_half():
    ratio = FadingRatio(half_life=10.0)
    ratio.observe(0.0, 10.0)
    ratio.observe(10.0, 10.0)
    assert ratio.value == pytest.approx(10.0 / 15.0)


def test_line_finds_the_fixed_part_and_the_part_for_each():
    line = line_of((1, 12.0), (4, 18.0), (2, 14.0), (7, 24.0))
    assert line.at(0) == pytest.approx(10.0)
    assert line.at(10) == pytest.approx(30.0)


def test_line_through_equal_points_is_flat():
    assert line_of((4, 8.0), (4, 10.0), half_life=1e9).at(16) == pytest.approx(9.0)


def test_cost_that_falls_with_the_count_is_taken_for_flat():
    line = line_of((1, 10.0), (9, 2.0), half_life=1e9)
    assert line.at(1) == line.at(9) == pytest.approx(6.0)


def test_cost_that_rises_faster_than_the_count_has_no_negative_fixed_part():
    line = line_of((10, 0.0), (11, 42.0), half_life=1e9)
    assert line.at(0) == pytest.approx(0.0)
    assert line.at(21) == pytest.approx(42.0)


def test_line_forgets_a_machine_that_was_slow():
    line = line_of(*[(x % 5, 50.0) for x in range(50)], half_life=4.0)
    for x in range(100):
        line.observe(x % 5, 1.0 + x % 5)
    assert line.at(3) == pytest.approx(4.0, rel=1e-3)


@given(points=st.lists(st.tuples(counts, seconds), min_size=1, max_size=30), x=counts)
def test_line_never_says_less_than_nothing_and_goes_no_steeper_than_through_the_origin(points, x):
    line = line_of(*points, half_life=8.0)
    at = line.at(x)
    assert at is not None
    assert at >= -1e-9
    assert at <= max(y for _, y in points) * max(1.0, x) + 1e-6


@given(
    parts=st.tuples(seconds, st.floats(min_value=0.0, max_value=1.0)),
    xs=st.lists(counts, min_size=2, max_size=30, unique=True),
    x=counts,
)
def test_costs_on_a_line_are_found_again(parts, xs, x):
    fixed, each = parts
    line = line_of(*[(one, fixed + each * one) for one in xs])
    assert line.at(x) == pytest.approx(fixed + each * x, rel=1e-6, abs=1e-6)
