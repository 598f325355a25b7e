import stat

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.workers.models.conftest import MERGES, TOKENS
from workers.models.errors import ModelFormatError
from workers.models.gguf import convert

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def to_gguf_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"


def gguf_tensors(model):
    config = model.config
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", values
        elif name == "model.norm.weight":
            yield "output_norm.weight", values
        elif name.endswith("q_proj.weight"):
            yield gguf_name(name), to_gguf_rows(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            yield gguf_name(name), to_gguf_rows(values, config.num_key_value_heads)
        else:
            yield gguf_name(name), values


def write_gguf(path, model, *, architecture="llama", pre="smollm", extra=(), without=()):
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(100000.0)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in [*gguf_tensors(model), *extra]:
        if name not in without:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path, tiny_model):
    target = tmp_path / "converted"
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_model), target)
    return target


def test_converted_model_computes_what_the_original_computes(converted, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = torch.randint(0, len(TOKENS), (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny_model(ids).logits, rtol=0, atol=0)


def test_converted_config_is_the_original_one(converted, tiny_model):
    config = AutoModelForCausalLM.from_pretrained(converted).config
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.max_position_embeddings == 128
    assert config.tie_word_embeddings
    assert config.dtype == torch.bfloat16
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert not hasattr(config, "quantization_config")


def test_converted_tokenizer_splits_digits_and_keeps_special_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == 128
    assert tokenizer.tokenize("he  12 t") == ["he", "ĠĠ", "1", "2", "Ġt"]
    assert tokenizer("<|im_end|>he").input_ids == [2, TOKENS.index("he")]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    text = "Grüße, 世界! don't\n\n 42"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_every_file_can_be_read_by_those_who_can_read_the_config(converted):
    assert len({stat.S_IMODE(path.stat().st_mode) for path in converted.iterdir()}) == 1


def test_progress_counts_the_tensors(tmp_path, tiny_model):
    calls = []
    source = write_gguf(tmp_path / "tiny.gguf", tiny_model)
    convert(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    total = 2 + 2 * len(NAMES)
    assert calls == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; only 'llama'"),
        ({"pre": "qwen2"}, "'qwen2' splitting"),
        ({"without": ("output_norm.weight",)}, r"1 differ, the first is model\.norm\.weight"),
        ({"extra": [("blk.0.odd", np.zeros(4, np.float32))]}, r"'blk\.0\.odd' that a Llama model"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, tiny_model, options, sentence):
    source = write_gguf(tmp_path / "tiny.gguf", tiny_model, **options)
    with pytest.raises(ModelFormatError, match=sentence):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    source = tmp_path / "odd.gguf"
    source.write_bytes(b"not a gguf file" * 100)
    with pytest.raises(ModelFormatError, match=r"odd\.gguf cannot be read as a GGUF file"):
        convert(source, tmp_path / "out")
