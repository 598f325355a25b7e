"""Log-probabilities against a log-softmax of the whole vocabulary in fp64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.logprobs import logprobs_of, sample_with_logprobs
from workers.engine.sampler import SamplingRow, sample
from workers.engine.sampling_params import SamplingParams


def make_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    return logits.double().log_softmax(dim=-1).numpy()


def row(position: int = 0, **changes) -> SamplingRow:
    return SamplingRow(params=SamplingParams(max_tokens=4, **changes), position=position)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.sampled_from([1, 5, 32, 33, 70]),
    vocabulary=st.sampled_from([3, 100, 1000]),
    num_top=st.integers(0, 20),
)
def test_every_row_is_the_log_softmax(seed, rows, vocabulary, num_top):
    logits = make_logits(rows, vocabulary, seed)
    token_ids = np.random.default_rng(seed).integers(0, vocabulary, rows).tolist()

    found = logprobs_of(logits, token_ids, num_top)

    for expected, token_id, logprobs in zip(log_softmax(logits), token_ids, found, strict=True):
        order = np.argsort(-expected)
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert expected[order[logprobs.rank - 1]] == expected[token_id]
        assert len(logprobs.top) == min(num_top, vocabulary)
        values = [value for _, value in logprobs.top]
        assert values == pytest.approx(expected[order[:num_top]].tolist(), abs=1e-5)
        chances = [expected[each] for each, _ in logprobs.top]
        assert chances == pytest.approx(values, abs=1e-5)


def test_numbers_survive_fp32():
    """A trip over the wire changes nothing."""
    (found,) = logprobs_of(make_logits(1, 1000), [7], 20)

    assert found is not None
    for value in (found.logprob, *(value for _, value in found.top)):
        assert value == float(np.float32(value))


def test_equally_likely_tokens_share_a_rank_and_come_by_rising_id():
    (found,) = logprobs_of(torch.zeros(1, 6), [4], 6)

    assert found is not None
    assert found.rank == 1
    assert [each for each, _ in found.top] == [0, 1, 2, 3, 4, 5]


def test_an_impossible_token_has_the_logarithm_of_zero():
    (found,) = logprobs_of(torch.tensor([[0.0, -math.inf]]), [1], 0)

    assert found is not None
    assert (found.logprob, found.rank) == (-math.inf, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_none(bad):
    logits = make_logits(3, 50)
    logits[1, 9] = bad

    found = logprobs_of(logits, [1, 2, 3], 2)

    assert [logprobs is None for logprobs in found] == [False, True, False]


def test_sampled_tokens_are_judged_by_the_models_own_distribution():
    """Not by what bias, penalties, temperature and filters leave of it."""
    logits = make_logits(1, 100)
    (banned,) = logits.argmax(dim=1).tolist()
    asked = row(temperature=0.3, top_k=5, logit_bias=((banned, -100.0),), logprobs=3)

    (sampled,) = sample_with_logprobs(logits.clone(), [asked])

    assert sampled is not None
    assert sampled.token_id != banned
    assert sampled.logprobs is not None
    assert sampled.logprobs.top[0][0] == banned
    expected = log_softmax(logits)[0]
    assert sampled.logprobs.logprob == pytest.approx(expected[sampled.token_id], abs=1e-5)


def test_each_row_gets_what_it_asks_for_and_the_same_token():
    logits = make_logits(5, 200)
    logits[4, 3] = math.nan
    asked = [None, 2, 0, 20, 5]
    rows = [row(position, logprobs=number) for position, number in enumerate(asked)]

    found = sample_with_logprobs(logits.clone(), rows)

    assert [each and each.token_id for each in found] == sample(logits.clone(), rows)
    assert found[4] is None
    got = [each.logprobs for each in found[:4] if each is not None]
    assert [each and len(each.top) for each in got] == asked[:4]


def test_no_rows_give_nothing():
    assert sample_with_logprobs(torch.empty(0, 10), []) == []
    assert logprobs_of(torch.empty(0, 10), [], 5) == []
