"""From a body to sampling parameters: limits, the model's own defaults, seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.openai.errors import InvalidRequestError
from deployments.openai.models import ModelCard, SamplingDefaults, model_list
from deployments.openai.sampling import check_prompt_ids, choice_seed, sampling_params
from deployments.openai.schema import parse_chat, parse_completion
from workers.engine.sampling_params import SamplingParams
from workers.runner_choice import RunnerChoice

CARD = ModelCard(
    name="m",
    window=100,
    vocab_size=50,
    eos_token_ids=frozenset({1, 2}),
    default_max_tokens=30,
    runner=RunnerChoice(tier="stock", cause="by_hand", reason="any"),
)


def sampling(prompt_tokens: int = 10, card: ModelCard = CARD, **fields) -> SamplingParams:
    body = parse_completion({"model": "m", "prompt": "x", **fields})
    return sampling_params(
        body, card, prompt_tokens=prompt_tokens, prompt_param="prompt", seed=fields.get("seed", 7)
    )


def refusal(**arguments) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        sampling(**arguments)
    return caught.value


def test_a_body_without_wishes_gets_neutral_sampling():
    assert sampling() == SamplingParams(
        max_tokens=30, seed=7, temperature=1.0, stop_token_ids=frozenset({1, 2})
    )


@pytest.mark.parametrize(("prompt_tokens", "limit"), [(10, 30), (70, 30), (71, 29), (99, 1)])
def test_an_omitted_limit_is_the_default_or_what_the_window_leaves(prompt_tokens, limit):
    """Row 44."""
    assert sampling(prompt_tokens).max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_above_the_room_is_refused_with_the_numbers(name):
    """Rows 24 and 26: the same for both names; window, prompt and limit are in the message."""
    assert sampling(10, **{name: 90}).max_tokens == 90
    error = refusal(prompt_tokens=10, **{name: 91})
    assert (error.param, error.code) == (name, "context_length_exceeded")
    for number in ("100", "10", "91", "90"):
        assert number in error.message


@pytest.mark.parametrize(
    ("prompt_tokens", "fields"), [(100, {}), (101, {}), (101, {"max_tokens": 5})]
)
def test_a_prompt_that_fills_the_window_is_refused(prompt_tokens, fields):
    """Row 25."""
    error = refusal(prompt_tokens=prompt_tokens, **fields)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert str(prompt_tokens) in error.message


def test_a_prompt_without_tokens_is_refused():
    """Row 1."""
    assert refusal(prompt_tokens=0).param == "prompt"


def test_min_tokens_cannot_exceed_the_limit():
    assert sampling(min_tokens=30).min_tokens == 30
    assert refusal(min_tokens=31).param == "min_tokens"
    assert refusal(min_tokens=6, max_tokens=5).param == "min_tokens"


def test_the_models_defaults_hold_where_the_body_says_nothing():
    defaults = SamplingDefaults(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1
    )
    card = replace(CARD, defaults=defaults)
    own = sampling(card=card)
    assert (own.temperature, own.top_p, own.top_k) == (0.6, 0.9, 20)
    assert (own.min_p, own.repetition_penalty) == (0.1, 1.1)
    given = sampling(card=card, temperature=0, top_p=1, top_k=-1, min_p=0.2, repetition_penalty=1)
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0, 1, 0, 0.2)
    assert given.repetition_penalty == 1


def test_penalties_bias_and_log_probabilities_go_down_as_they_are():
    """Rows 76 and 77: each has its own meaning."""
    asked = sampling(
        repetition_penalty=1.3,
        frequency_penalty=-0.5,
        presence_penalty=2,
        logit_bias={"0": -100, "49": 3},
        logprobs=2,
        prompt_logprobs=4,
    )
    assert asked.repetition_penalty == 1.3
    assert (asked.frequency_penalty, asked.presence_penalty) == (-0.5, 2)
    assert asked.logit_bias == ((0, -100), (49, 3))
    assert (asked.logprobs, asked.prompt_logprobs) == (2, 4)
    assert sampling(echo=True, logprobs=2).prompt_logprobs == 2


def test_an_echo_without_output_samples_one_token_that_is_not_shown():
    assert sampling(echo=True, max_tokens=0).max_tokens == 1
    assert refusal(prompt_tokens=100, echo=True, max_tokens=0).param == "prompt"


def test_ignore_eos_ignores_every_end_token_but_not_the_clients():
    """Row 35: a model may have two end ids."""
    assert sampling(ignore_eos=True).stop_token_ids == frozenset()
    assert sampling(ignore_eos=True, stop_token_ids=[9]).stop_token_ids == {9}
    assert sampling(stop_token_ids=[9]).stop_token_ids == {1, 2, 9}


def test_ids_outside_the_vocabulary_are_refused():
    """Row 3, for prompts and for stop tokens."""
    check_prompt_ids((0, 49), CARD)
    with pytest.raises(InvalidRequestError, match="50") as caught:
        check_prompt_ids((3, 50), CARD)
    assert caught.value.param == "prompt"
    assert sampling(stop_token_ids=[49]).stop_token_ids == {1, 2, 49}
    assert refusal(stop_token_ids=[50]).param == "stop_token_ids"
    biased = refusal(logit_bias={"49": 1, "50": 5})  # row 4
    assert biased.param == "logit_bias"
    assert "50" in biased.message


def test_seeds_of_choices_are_fixed_distinct_and_fit_63_bits():
    """Row 73."""
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        seeds = [choice_seed(seed, choice) for choice in range(16)]
        assert len(set(seeds)) == 16
        assert all(0 <= value < 2**63 for value in seeds)
        assert seeds == [choice_seed(seed, choice) for choice in range(16)]
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) != choice_seed(8, 1)


def test_chat_names_messages_where_completions_name_the_prompt():
    body = parse_chat({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(InvalidRequestError) as caught:
        sampling_params(body, CARD, prompt_tokens=100, prompt_param="messages", seed=1)
    assert caught.value.param == "messages"


def test_the_list_of_models_shows_the_window():
    (shown,) = model_list([CARD], {})["data"]
    assert (shown["id"], shown["object"], shown["max_model_len"]) == ("m", "model", 100)
