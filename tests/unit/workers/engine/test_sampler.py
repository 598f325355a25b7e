"""The sampler against a slow reference: the whole distribution in fp64, one row at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fakes.reference_sampler import reference_draw
from workers.engine.sampler import SamplingRow, sample
from workers.engine.sampling_params import SamplingParams


def params(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=8, **changes)


def row(position=0, num_output_tokens=0, **changes) -> SamplingRow:
    return SamplingRow(
        params=params(**changes), position=position, num_output_tokens=num_output_tokens
    )


def make_logits(*shape, seed=0, spread=2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


FILTERS = [
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(
    "filters",
    [
        *FILTERS,
        {"top_p": 0.05},
        {"top_p": 0.999},
        {"top_k": 255},
        {"top_k": 256},
        {"top_k": 4096},
        {"top_k": 300, "top_p": 0.9},
        {"min_p": 0.001},
        {"min_p": 1.0},
        {"temperature": 4.0, "top_p": 0.9},
    ],
    ids=str,
)
def test_a_large_vocabulary_gives_the_references_token(filters, spread):
    logits = make_logits(40, 9000, seed=5, spread=spread)
    rows = [row(position, seed=3, **filters) for position in range(40)]

    drawn = sample(logits.clone(), rows)

    expected = [reference_draw(logits[i].double().numpy(), rows[i].params, i) for i in range(40)]
    assert drawn == expected


@pytest.mark.parametrize("top_k", [3, 200, 300, 5000])
def test_of_equally_likely_tokens_the_lower_ids_are_kept(top_k):
    logits = torch.zeros(200, 9000)
    logits[:, 8000] = 0.1
    rows = [row(position, seed=1, top_k=top_k) for position in range(200)]

    drawn = sample(logits, rows)

    assert set(drawn) <= {8000, *range(top_k - 1)}
    assert max(set(drawn) - {8000}) > 0.8 * (top_k - 2)


def test_coarse_logits_with_many_ties_give_the_references_token():
    logits = make_logits(40, 9000, seed=6).round()
    for filters in ({"top_k": 40}, {"top_p": 0.5}, {"top_k": 500, "top_p": 0.95}):
        rows = [row(position, seed=4, **filters) for position in range(40)]

        drawn = sample(logits.clone(), rows)

        assert drawn == [
            reference_draw(logits[i].double().numpy(), rows[i].params, i) for i in range(40)
        ]


def test_all_of_a_large_vocabulary_can_be_drawn():
    logits = torch.zeros(1, 9000)

    rows = [row(position, seed=11) for position in range(1000)]

    drawn = np.array(sample(logits.expand(1000, -1).clone(), rows))

    low, middle, high = np.quantile(drawn, [0.25, 0.5, 0.75]) / 9000
    assert (low, middle, high) == pytest.approx((0.25, 0.5, 0.75), abs=0.04)
    assert drawn.max() > 8900


SETTINGS = st.builds(
    row,
    position=st.integers(0, 100_000),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 256, 500, 2000]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.lists(SETTINGS, min_size=1, max_size=6), st.integers(0, 2**16))
def test_a_rows_token_does_not_depend_on_the_batch(rows, seed):
    logits = make_logits(len(rows), 1000, seed=seed)

    together = sample(logits.clone(), rows)

    assert together == [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(len(rows))]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"temperature": 2.0}])
def test_a_draw_hardly_ever_turns_on_the_rounding_of_its_logits(filters):
    """As another batch rounds them: with top-p 1 of 60 did when sums over tokens decided."""
    logits = make_logits(20, 50_000, spread=1.0)
    rounded = logits * (1 + 1e-6 * make_logits(20, 50_000, seed=1))
    changed = 0
    for start in range(0, 240, 20):
        rows = [row(start + i, seed=7, **filters) for i in range(20)]
        changed += sum(map(int.__ne__, sample(logits.clone(), rows), sample(rounded.clone(), rows)))

    assert changed <= 1


def test_greedy_takes_the_likeliest_token_and_of_equals_the_first():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 1.0, 0.0, -1.0]])

    assert sample(logits, [row(temperature=0.0), row(temperature=0.0)]) == [1, 0]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature, filters):
    """In fp32 the smallest of them are 0, and 0/0 would make an id outside the vocabulary."""
    logits = make_logits(3, 500)

    drawn = sample(logits.clone(), [row(i, temperature=temperature, **filters) for i in range(3)])

    assert drawn == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e30])
def test_an_extreme_temperature_draws_from_the_vocabulary(temperature, filters):
    logits = make_logits(3, 500)

    drawn = sample(logits.clone(), [row(i, temperature=temperature, **filters) for i in range(3)])

    assert all(token_id is not None and 0 <= token_id < 500 for token_id in drawn)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad, temperature):
    logits = make_logits(3, 100)
    logits[1, 40] = bad
    clean = [0, 2]
    rows = [row(i, temperature=temperature, top_k=5) for i in range(3)]

    drawn = sample(logits.clone(), rows)

    assert drawn[1] is None
    assert [drawn[i] for i in clean] == sample(logits[clean], [rows[i] for i in clean])


def test_a_row_without_a_possible_token_fails():
    assert sample(torch.full((1, 4), -math.inf), [row()]) == [None]


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((500, 300), -math.inf)
    logits[:, [7, 200]] = 0.0

    for filters in ({}, {"top_p": 0.99}, {"top_k": 290}):
        drawn = sample(logits.clone(), [row(i, **filters) for i in range(500)])
        assert set(drawn) == {7, 200}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature):
    logits = torch.zeros(1, 10)
    logits[0, 4] = 50.0
    stop = frozenset({4, 10, 99})  # a client may name tokens that there are not
    changes = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": stop}

    before = sample(logits.clone(), [row(num_output_tokens=2, **changes)])
    after = sample(logits.clone(), [row(num_output_tokens=3, **changes)])

    assert before != [4]
    assert after == [4]


def test_half_precision_logits_are_sampled_in_single_precision():
    logits = make_logits(20, 2000).bfloat16()
    rows = [row(i, top_p=0.9) for i in range(20)]

    assert sample(logits, rows) == sample(logits.float(), rows)


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 10), []) == []
