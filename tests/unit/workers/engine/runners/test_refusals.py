"""What the configuration alone says agrees with what the checks at load find."""

import pytest
from transformers import AutoConfig

from tests.fakes.tiny_models import MAX_MODEL_LEN, REFUSED, SERVED, make_model
from workers.runner_choice import LLAMA_SHAPED_TYPES, architecture_of, choose_runner

SEEN_AT_LOAD_ONLY = {"llama"}
"""Rotary frequencies that depend on the longest sequence are told by no name."""


def choice_of(family, changes):
    config = make_model(family, changes).config
    return choose_runner(architecture_of(config.to_dict()), window=MAX_MODEL_LEN)


@pytest.mark.parametrize("family", SERVED)
def test_a_family_that_is_served_is_not_refused_by_its_configuration(family):
    expected = "llama_shaped" if family in LLAMA_SHAPED_TYPES else "stock"

    assert choice_of(family, SERVED[family]).tier == expected


@pytest.mark.parametrize("family", sorted(REFUSED.keys() - SEEN_AT_LOAD_ONLY))
def test_a_family_that_is_refused_at_load_is_refused_by_its_configuration(family):
    changes, _ = REFUSED[family]

    assert choice_of(family, changes).tier == "refused"


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_an_encoder_decoder_is_refused(family):
    choice = choose_runner(architecture_of(AutoConfig.for_model(family).to_dict()), window=512)

    assert choice.tier == "refused"
    assert "encoder" in choice.reason
