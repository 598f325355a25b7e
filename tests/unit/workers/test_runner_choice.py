from typing import Any

import pytest

from workers.runner_choice import (
    LLAMA_SHAPED_TYPES,
    Architecture,
    RunnerChoice,
    architecture_of,
    choose_runner,
)


def choice_of(*, window: int = 1000, **config: Any) -> RunnerChoice:
    return choose_runner(architecture_of(config), window=window)


@pytest.mark.parametrize("model_type", sorted(LLAMA_SHAPED_TYPES))
def test_a_verified_family_is_run_by_the_decoder_of_our_own(model_type: str) -> None:
    choice = choice_of(model_type=model_type)

    assert (choice.tier, choice.cause) == ("llama_shaped", "verified_family")
    assert model_type in choice.reason


def test_any_other_family_is_run_by_its_stock_modules_and_the_reason_names_it() -> None:
    choice = choice_of(model_type="mixtral")

    assert choice.tier == "stock"
    assert "mixtral" in choice.reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "recurrent layers"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon"}, "not through transformers' attention interface"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        (
            {"model_type": "new", "layer_types": ["full_attention", "linear_attention"]},
            "layers of kind linear_attention",
        ),
        (
            {"model_type": "vlm", "text_config": {"layer_types": ["conv"]}},
            "layers of kind conv",
        ),
    ],
)
def test_what_blocks_cannot_hold_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    choice = choice_of(**config)

    assert choice.tier == "refused"
    assert reason in choice.reason


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text", "attention_chunk_size": 8192},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
)
def test_chunked_attention_is_served_up_to_its_chunk(config: dict[str, Any]) -> None:
    assert choice_of(**config, window=8192).tier == "stock"

    choice = choice_of(**config, window=8193)

    assert choice.tier == "refused"
    assert "lower model.max_model_len from 8193 to 8192" in choice.reason


def test_sliding_and_full_layers_are_held() -> None:
    kinds = ["sliding_attention", "full_attention"]

    assert choice_of(model_type="gemma2", layer_types=kinds).tier == "llama_shaped"


def test_what_is_not_of_the_expected_type_counts_as_not_said() -> None:
    config = {"layer_types": 3, "attention_chunk_size": "no", "text_config": None}

    assert architecture_of(config) == Architecture(model_type="None")
