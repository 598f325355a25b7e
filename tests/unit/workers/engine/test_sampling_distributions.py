"""What each parameter does to the tokens that are drawn, against the slow reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.reference_sampler import chi_square_excess, distribution, reference_draw
from workers.engine.sampler import SamplingRow, sample
from workers.engine.sampling_params import SamplingParams
from workers.engine.token_counts import TokenCounts

VOCABULARY = 101
LIKELIEST = 11
PROMPT = (0, 3, 3, 5, 8, 13, 21, 34)
OUTPUT = (5, 8, 8, 8, LIKELIEST, 40, 2, 2)
NUM_DRAWS = 20_000
LIMIT = 3
"""Standard deviations: right draws stay below, those of a temperature wrong by 5 % lie above."""

ASKED = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 60},
    {"top_p": 0.8},
    {"min_p": 0.007},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"logit_bias": ((2, 3.0), (5, -100.0), (17, -1.5))},
    {"min_tokens": 9, "stop_token_ids": frozenset({1, 4, 9})},
    {
        "temperature": 1.2,
        "top_k": 90,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": ((7, 2.0), (8, 1.0)),
        "min_tokens": 9,
        "stop_token_ids": frozenset({4}),
    },
]

Sampler = Callable[[torch.Tensor, Sequence[SamplingRow]], list[int | None]]


def five_percent_too_hot(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """The planted fault."""
    hot = [
        replace(row, params=replace(row.params, temperature=1.05 * row.params.temperature))
        for row in rows
    ]
    return sample(logits, hot)


def params(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=64, seed=11, **changes)


def make_logits(temperature: float) -> torch.Tensor:
    """One token has half of the chance: so, few draws show most of a wrong temperature."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[LIKELIEST] = -torch.inf
    logits[LIKELIEST] = logits.logsumexp(0)
    return logits * temperature


def row(position: int, asked: SamplingParams, prompt=PROMPT, output=OUTPUT) -> SamplingRow:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return SamplingRow(
        params=asked, position=position, num_output_tokens=len(output), seen=counts.seen()
    )


def excess(sampler: Sampler, asked: SamplingParams) -> float:
    """How far a sampler's draws at many positions are from the reference's distribution."""
    logits = make_logits(asked.temperature)
    like = row(0, asked)
    drawn: list[int] = []
    for first in range(0, NUM_DRAWS, 1000):
        rows = [replace(like, position=position) for position in range(first, first + 1000)]
        for token_id in sampler(logits.expand(1000, -1).clone(), rows):
            assert token_id is not None
            drawn.append(token_id)
    return chi_square_excess(drawn, distribution(logits.double().numpy(), asked, PROMPT, OUTPUT))


@pytest.mark.parametrize("changes", ASKED, ids=str)
def test_draws_follow_the_reference_distribution(changes):
    assert excess(sample, params(**changes)) < LIMIT


@pytest.mark.parametrize("changes", ASKED, ids=str)
def test_a_temperature_wrong_by_five_percent_is_seen(changes):
    """The same check, on a sampler with a fault: for every parameter it has the power to see it."""
    assert excess(five_percent_too_hot, params(**changes)) > LIMIT


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.0}),
        ({"frequency_penalty": 0.8}, {"frequency_penalty": 0.0}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 0.0}),
        ({"logit_bias": ((4, 3.0),)}, {"logit_bias": ()}),
        ({"min_tokens": 9, "stop_token_ids": frozenset({4})}, {"min_tokens": 8}),
    ],
    ids=str,
)
def test_a_parameter_that_has_no_effect_is_seen(changes, ignored):
    def deaf(logits, rows):
        return sample(logits, [replace(r, params=replace(r.params, **ignored)) for r in rows])

    assert excess(deaf, params(**changes)) > LIMIT


tokens = st.lists(st.integers(0, 2999), max_size=40)


@settings(max_examples=40, deadline=None)
@given(
    prompt=tokens.filter(bool),
    output=tokens,
    position=st.integers(0, 10_000),
    seed=st.integers(0, 2**63 - 1),
    repetition=st.sampled_from([1.0, 1.3, 0.5, 5.0]),
    frequency=st.sampled_from([0.0, 0.6, -2.0]),
    presence=st.sampled_from([0.0, 1.1, -0.4]),
    bias=st.dictionaries(st.integers(0, 2999), st.floats(-100, 100, width=16), max_size=5),
    filters=st.sampled_from([{"top_p": 0.9}, {"top_k": 40}, {"temperature": 1.5, "min_p": 0.02}]),
)
def test_a_large_vocabulary_gives_the_references_token(
    prompt, output, position, seed, repetition, frequency, presence, bias, filters
):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(seed % 1000)) * 3
    asked = SamplingParams(
        max_tokens=64,
        seed=seed,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=tuple(bias.items()),
        **filters,
    )

    drawn = sample(logits.unsqueeze(0).clone(), [row(position, asked, prompt, output)])

    assert drawn == [reference_draw(logits.double().numpy(), asked, position, prompt, output)]


def test_a_banned_token_never_comes_and_a_favoured_one_always_does():
    """Row 79: also where it is the likeliest, in every row."""
    logits = torch.zeros(4, 20)
    logits[:, 6] = 30.0
    banned = params(temperature=0.0, logit_bias=((6, -100.0),))
    favoured = params(temperature=1.0, logit_bias=((9, 100.0),))

    drawn = sample(logits, [row(0, banned), row(1, banned), row(2, favoured), row(3, favoured)])

    assert 6 not in drawn
    assert drawn[2:] == [9, 9]


def test_ids_that_the_model_does_not_have_are_passed_over():
    asked = params(temperature=0.0, logit_bias=((20, 100.0), (3, 1.0)))

    assert sample(torch.zeros(1, 20), [row(0, asked, prompt=(1,), output=())]) == [3]


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 100.0])
def test_an_extreme_repetition_penalty_breaks_no_row(penalty):
    logits = torch.tensor([[1.0, -2.0, 0.5, -0.1]])
    asked = params(repetition_penalty=penalty, top_p=0.9)

    drawn = sample(logits, [row(0, asked, prompt=(0, 1), output=(2,))])

    assert drawn[0] in range(4)


def test_a_row_without_wishes_keeps_its_logits():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()

    sample(logits, [row(0, params()), row(1, params(top_p=0.5, min_p=0.1))])

    assert torch.equal(logits, before)
