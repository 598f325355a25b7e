from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from configs.schema import ModelSettings
from workers.models.errors import ModelAccessError, ModelFormatError, ModelNotFoundError
from workers.models.facts import facts_from_info, find_snapshot, read_facts
from workers.planning import ModelFacts
from workers.runner_choice import Architecture

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}


class StubInfo:
    """The fields of ModelInfo that planning uses; the real one needs torch."""

    weights_digest = "w"
    context_length = 100
    sliding_windows = (None, 8)
    num_layers = 2
    num_kv_heads = 3
    head_dim = 8
    vocab_size = 50
    num_parameters = 1000
    architecture_facts = Architecture(model_type="stub")


def write_model(folder: Path, config: object, *, weight_bytes: int | None = 1000) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if weight_bytes is not None:
        (folder / "model.safetensors").write_bytes(bytes(weight_bytes))
    return folder


def facts_of(path: Path, **model: Any) -> ModelFacts:
    return read_facts(path, ModelSettings(**model), is_faster_in_bf16=False)


def test_stated_sizes_are_read_without_torch(tmp_path: Path) -> None:
    facts = facts_of(write_model(tmp_path, CONFIG))

    assert facts == ModelFacts(
        digest="",
        context_length=8192,
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        dtype="float32",
        element_bytes=4,
        vocab_size=49152,
        architecture=Architecture(model_type="llama"),
        weight_bytes=2000,  # stored in two bytes each, served in four
    )


def test_weights_in_the_stored_dtype_keep_their_size(tmp_path: Path) -> None:
    assert facts_of(write_model(tmp_path, CONFIG), dtype="bf16").weight_bytes == 1000


def test_older_name_of_the_dtype_is_known(tmp_path: Path) -> None:
    config = {**CONFIG, "dtype": None, "torch_dtype": "float32"}

    assert facts_of(write_model(tmp_path, config)).weight_bytes == 1000


@pytest.mark.parametrize(
    ("changes", "weight_bytes"), [({"dtype": "int3"}, 1000), ({}, None), ({"dtype": None}, 1000)]
)
def test_weights_of_unknown_size_are_said_to_be(
    tmp_path: Path, changes: dict[str, Any], weight_bytes: int | None
) -> None:
    path = write_model(tmp_path, {**CONFIG, **changes}, weight_bytes=weight_bytes)

    assert facts_of(path).weight_bytes is None


def test_composite_model_is_sized_by_its_text_part(tmp_path: Path) -> None:
    config = {"dtype": "bfloat16", "text_config": {**CONFIG, "num_hidden_layers": 7}}

    assert facts_of(write_model(tmp_path, config)).num_layers == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "never heard of"},
    ],
)
def test_configuration_without_a_sliding_window_is_read_without_torch(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    facts = facts_of(write_model(tmp_path, {**CONFIG, **changes}))

    assert (facts.num_layers, facts.sliding_windows) == (30, ())


@pytest.mark.parametrize(
    "config",
    [
        {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"},
        {**CONFIG, "head_dim": None},
        {**CONFIG, "model_type": "mistral"},  # whose window may be the family's default
        {**CONFIG, "model_type": "mistral", "sliding_window": 4096},
        {**CONFIG, "vocab_size": True},
        {"text_config": 3},
        {**CONFIG, "kv_lora_rank": 16},
    ],
)
def test_configuration_that_leaves_something_out_is_read_by_transformers(
    tmp_path: Path, config: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of the same name, so that this test needs no torch.
    loading = ModuleType("workers.models.loading")
    loading.load_model_info = lambda path: StubInfo()  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "workers.models.loading", loading)

    facts = facts_of(write_model(tmp_path, config))

    assert facts.num_layers == 2
    assert facts.digest == "w"


def test_facts_of_a_loaded_model_carry_its_digest() -> None:
    info: Any = StubInfo()

    facts = facts_from_info(info, ModelSettings(), is_faster_in_bf16=True)

    assert facts == ModelFacts(
        digest="w",
        context_length=100,
        num_layers=2,
        num_kv_heads=3,
        head_dim=8,
        dtype="bfloat16",
        element_bytes=2,
        vocab_size=50,
        architecture=Architecture(model_type="stub"),
        sliding_windows=(None, 8),
        weight_bytes=2000,
    )


def test_missing_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelAccessError, match="No such file"):
        facts_of(tmp_path)


@pytest.mark.parametrize(("text", "words"), [("{", "not valid JSON"), ("[]", "JSON object")])
def test_configuration_that_is_none_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelFormatError, match=words):
        facts_of(tmp_path)


def test_hub_model_that_was_not_pulled_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="baton models pull some/model"):
        find_snapshot("some/model", tmp_path)


def test_hub_model_in_the_cache_is_found(tmp_path: Path) -> None:
    revision = "0" * 40
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")

    assert find_snapshot("some/model", tmp_path) == snapshot


def test_hub_id_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not a valid hub id"):
        find_snapshot("some/--model..", tmp_path)
