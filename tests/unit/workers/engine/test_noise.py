"""The numbers that draws are made of: whose they are, how they are spread, and that they stay."""

import numpy as np
import pytest
import torch

from tests.fakes.reference_sampler import chi_square_excess
from workers.engine.noise import draw_keys, log_arrivals

LIMIT = 4
"""Standard deviations that chance alone does not reach."""


def shares(key: int, num_tokens: int) -> np.ndarray:
    """What the times are of their distribution: uniform in [0, 1)."""
    token_ids = torch.arange(num_tokens, dtype=torch.int32)
    return -np.expm1(-np.exp(log_arrivals(key, token_ids).double().numpy()))


def cells_excess(first: np.ndarray, second: np.ndarray) -> float:
    """How far pairs of numbers in [0, 1) are from lying anywhere alike."""
    cells = np.histogram2d(first.ravel(), second.ravel(), bins=10, range=[[0, 1]] * 2)[0].ravel()
    return chi_square_excess(np.repeat(np.arange(100), cells.astype(int)), np.full(100, 0.01))


def test_keys_are_functions_of_seed_and_position():
    assert draw_keys([5, 6, 5], [1, 2, 3]) == [
        draw_keys([seed], [position])[0] for seed, position in ((5, 1), (6, 2), (5, 3))
    ]


def test_a_tokens_time_does_not_depend_on_which_others_are_looked_at():
    token_ids = torch.tensor([7, 49_000, 0, 300_000], dtype=torch.int32)
    (key,) = draw_keys([3], [9])

    together = log_arrivals(key, token_ids)

    assert together.tolist() == [log_arrivals(key, one).item() for one in token_ids[:, None]]


def test_the_numbers_stay_what_they_are():
    """Others here are another text for every seeded request."""
    keys = draw_keys([0, 1, 2**64 - 1], [0, 7, 8191])
    assert keys == [12035550249420947055, 3681697457321254924, 11109104991832760462]
    arrivals = [log_arrivals(key, torch.tensor([0, 1, 151_000], dtype=torch.int32)) for key in keys]
    assert torch.stack(arrivals).tolist() == [
        pytest.approx([0.7591299, 1.1454751, -0.2004721], rel=1e-6),
        pytest.approx([-0.0199712, -6.6290588, -0.3088232], rel=1e-5),
        pytest.approx([-0.2647783, -1.0198898, 1.9823238], rel=1e-6),
    ]


def test_the_shortest_times_have_as_many_digits_as_the_others():
    """Of a million tokens the first arrives after about a millionth; none arrives at 0 or never."""
    times = log_arrivals(draw_keys([1], [1])[0], torch.arange(1 << 20, dtype=torch.int32))
    assert torch.isfinite(times).all()
    assert times.min() == pytest.approx(-20 * np.log(2), abs=4)
    assert len(times[times < -10].unique()) == (times < -10).sum()


def test_times_of_neighbouring_tokens_positions_and_seeds_are_unrelated():
    by_position = np.stack([shares(key, 400) for key in draw_keys([0] * 100, range(100))])
    by_seed = np.stack([shares(key, 400) for key in draw_keys(range(100), [0] * 100)])
    for grid in (by_position, by_seed):
        assert cells_excess(grid[:, :-1], grid[:, 1:]) < LIMIT
        assert cells_excess(grid[:-1], grid[1:]) < LIMIT
