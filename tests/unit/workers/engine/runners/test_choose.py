import pytest

from workers.engine.runners.choose import LLAMA_SHAPED_TYPES, choose_runner


@pytest.mark.parametrize("model_type", sorted(LLAMA_SHAPED_TYPES))
def test_a_verified_family_is_run_by_the_decoder_of_our_own(model_type):
    choice = choose_runner(model_type)

    assert choice.tier == "llama_shaped"
    assert model_type in choice.reason


def test_any_other_family_is_run_by_its_stock_modules_and_the_reason_names_it():
    choice = choose_runner("mixtral")

    assert choice.tier == "stock"
    assert "mixtral" in choice.reason
