import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from workers.engine.runners.self_check import check_model
from workers.models.errors import ModelFormatError, ModelNotFoundError
from workers.models.loading import (
    GenerationDefaults,
    load_model_info,
    load_tokenizer,
    load_weights,
    sliding_windows_of,
)
from workers.models.store import RECORD_NAME


def load_fp32(path):
    return load_weights(path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")


def edit_json(path, **changes):
    value = json.loads(path.read_text()) if path.exists() else {}
    value |= changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


# --- load_model_info ---


def test_info_says_what_the_configuration_and_the_headers_say(tiny_directory, tiny_model):
    info = load_model_info(tiny_directory)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_layers, info.num_attention_heads, info.num_kv_heads) == (2, 4, 2)
    assert (info.head_dim, info.vocab_size, info.context_length) == (8, 262, 128)
    assert info.eos_token_ids == (2,)
    assert info.weights_dtype == "float32"
    assert info.num_parameters == sum(p.numel() for p in tiny_model.parameters())
    assert info.weights_size_bytes == 4 * info.num_parameters
    assert info.generation_defaults == GenerationDefaults()
    assert info.licence is None


def test_info_without_head_dim_or_kv_heads_falls_back_to_plain_attention(tiny_directory):
    edit_json(tiny_directory / "config.json", head_dim=None, num_key_value_heads=None)
    info = load_model_info(tiny_directory)
    assert (info.head_dim, info.num_kv_heads) == (8, 4)


@pytest.mark.parametrize(
    ("generation_eos", "config_eos", "expected"),
    [
        (2, 2, (2,)),
        ([5, 2], 2, (5, 2)),
        (None, [2, 7], (2, 7)),
        (9, None, (9,)),
        (None, None, (2,)),
    ],
)
def test_every_eos_token_of_both_files_counts(tiny_directory, generation_eos, config_eos, expected):
    edit_json(tiny_directory / "generation_config.json", eos_token_id=generation_eos)
    edit_json(tiny_directory / "config.json", eos_token_id=config_eos)
    assert load_model_info(tiny_directory).eos_token_ids == expected


def test_generation_defaults_count_only_where_sampling_is_the_default(tiny_directory):
    path = tiny_directory / "generation_config.json"
    edit_json(path, temperature=0.6, top_p=0.95, top_k=20)
    assert load_model_info(tiny_directory).generation_defaults == GenerationDefaults()
    edit_json(path, do_sample=True)
    assert load_model_info(tiny_directory).generation_defaults == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20
    )


def test_licence_comes_from_the_record(tiny_directory):
    edit_json(tiny_directory / RECORD_NAME, licence="MIT")
    assert load_model_info(tiny_directory).licence == "MIT"


def test_digest_survives_copying_and_resharding(tmp_path, tiny_directory, tiny_model):
    digest = load_model_info(tiny_directory).weights_digest
    copy = shutil.copytree(tiny_directory, tmp_path / "copy")
    assert load_model_info(copy).weights_digest == digest
    sharded = tmp_path / "sharded"
    tiny_model.save_pretrained(sharded, max_shard_size="40KB")
    assert (sharded / "model.safetensors.index.json").exists()
    assert load_model_info(sharded).weights_digest == digest


@pytest.mark.parametrize("change", ["value", "dtype", "name"])
def test_digest_tells_other_weights_apart(tiny_directory, change):
    digest = load_model_info(tiny_directory).weights_digest
    path = tiny_directory / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.v_proj.weight"
    weights.update(
        {
            "value": {name: weights[name] + 1e-3},
            "dtype": {name: weights[name].bfloat16()},
            "name": {"extra": weights.pop(name)},
        }[change]
    )
    save_file(weights, path, metadata={"format": "pt"})
    assert load_model_info(tiny_directory).weights_digest != digest


def test_info_of_a_missing_directory_is_a_sentence(tmp_path):
    with pytest.raises(ModelNotFoundError, match="There is no model directory"):
        load_model_info(tmp_path / "nope")


def test_info_refuses_weights_that_are_cut_short(tiny_directory):
    path = tiny_directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match="cut short"):
        load_model_info(tiny_directory)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_info_refuses_what_is_not_safetensors(tiny_directory, content):
    (tiny_directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match="cannot be read as a safetensors file"):
        load_model_info(tiny_directory)


def test_info_refuses_a_missing_shard(tiny_directory):
    edit_json(tiny_directory / "model.safetensors.index.json", weight_map={"a": "b.safetensors"})
    with pytest.raises(ModelFormatError, match=r"b\.safetensors cannot be read"):
        load_model_info(tiny_directory)


def test_info_refuses_a_checkpoint_without_tensors(tiny_directory):
    save_file({}, tiny_directory / "model.safetensors")
    with pytest.raises(ModelFormatError, match="hold no tensors"):
        load_model_info(tiny_directory)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "no_such_model"}, "cannot be used"),
        ({"model_type": "t5"}, "does not say max_position_embeddings"),
    ],
)
def test_info_refuses_configurations_it_cannot_use(tiny_directory, changes, sentence):
    path = tiny_directory / "config.json"
    path.write_text(json.dumps(changes))
    with pytest.raises(ModelFormatError, match=sentence):
        load_model_info(tiny_directory)


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "not valid JSON"), ("[]", "does not hold a JSON object")]
)
def test_info_refuses_a_broken_generation_config(tiny_directory, text, sentence):
    (tiny_directory / "generation_config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=sentence):
        load_model_info(tiny_directory)


def test_code_in_the_model_directory_is_never_run(tiny_directory):
    (tiny_directory / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(
        tiny_directory / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    with pytest.raises(ModelFormatError, match="cannot be used"):
        load_model_info(tiny_directory)


# --- load_weights ---


def test_weights_come_for_inference_in_the_asked_dtype(tiny_directory, tiny_model):
    model = load_fp32(tiny_directory)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    ids = torch.arange(10).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny_model(ids).logits)


def test_pickle_weights_are_refused(tiny_directory):
    (tiny_directory / "model.safetensors").unlink()
    torch.save({}, tiny_directory / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="only as pickle files"):
        load_fp32(tiny_directory)


def test_a_checkpoint_that_lacks_a_parameter_is_refused(tiny_directory):
    path = tiny_directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"lacks 1 parameters .* is model\.norm\.weight"):
        load_fp32(tiny_directory)


def test_weights_that_are_cut_short_are_refused(tiny_directory):
    path = tiny_directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFormatError, match="cannot be read"):
        load_fp32(tiny_directory)


# --- load_tokenizer ---


def test_tokenizer_is_a_fast_one(tiny_directory):
    tokenizer = load_tokenizer(tiny_directory)
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer("the end").input_ids) == "the end"


def test_a_directory_without_tokenizer_is_a_sentence(tiny_directory):
    for path in tiny_directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelFormatError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(tiny_directory)


def test_a_slow_tokenizer_is_refused(tiny_directory, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ModelFormatError, match=r"no fast version \(tokenizer\.json\)"):
        load_tokenizer(tiny_directory)


# --- sliding_windows_of ---


def config_of(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=3, **fields)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (config_of(), ()),
        (config_of(sliding_window=None), ()),
        (config_of(sliding_window=0), ()),
        (config_of(sliding_window=8), (8, 8, 8)),
        (config_of(sliding_window=8, layer_types=None), (8, 8, 8)),
        (config_of(sliding_window=8, layer_types=["full_attention"] * 3), ()),
        (
            config_of(
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention", "linear_attention"],
            ),
            (8, None, None),
        ),
    ],
)
def test_windows_are_those_of_the_layers_that_slide(config, windows):
    assert sliding_windows_of(config) == windows


@pytest.mark.parametrize("family", SERVED)
def test_windows_by_the_configuration_are_those_that_attention_is_asked_for(family):
    model = make_model(family, SERVED[family])
    layout = layout_of(model, block_size=4)

    scorings = check_model(model, layout, max_model_len=MAX_MODEL_LEN).scorings

    windows = layout.sliding_windows or (None,) * layout.num_layers
    assert tuple(scoring.sliding_window for scoring in scorings) == windows
