"""The default model as it comes out of the cache; skipped where it was not pulled."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.tiny_models import layout_of
from workers.engine.build import make_forward
from workers.engine.runners.self_check import check_model
from workers.models.errors import ModelNotFoundError
from workers.models.loading import load_model_info, load_tokenizer, load_weights
from workers.models.store import ModelStore, default_cache_dir

pytestmark = pytest.mark.model

NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def model_path():
    try:
        return ModelStore(default_cache_dir(os.environ)).resolve(NAME).path
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_greedy_text_names_the_capital(model_path):
    tokenizer = load_tokenizer(model_path)
    model = load_weights(model_path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt.input_ids.shape[1] :])


def test_plain_from_pretrained_loads_it(model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert model.dtype == torch.bfloat16
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(model_path).is_fast


def test_info_is_that_of_smollm2(model_path):
    info = load_model_info(model_path)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_layers, info.num_attention_heads, info.num_kv_heads) == (30, 9, 3)
    assert (info.head_dim, info.vocab_size, info.context_length) == (64, 49152, 8192)
    assert info.num_parameters == 134_515_008
    assert info.eos_token_ids == (2,)
    assert info.licence == "Apache-2.0"


@pytest.fixture
def one_thread():
    """Two threads that wait for each other take many times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_run_by_the_decoder_of_our_own(model_path, dtype):
    model = load_weights(model_path, dtype=dtype, device="cpu", attn_implementation="eager")
    layout = layout_of(model, block_size=16)

    _, choice = make_forward(model, check_model(model, layout, max_model_len=2048), layout)

    assert (choice.tier, choice.cause) == ("llama_shaped", "verified_family")


def test_tokenizer_is_that_of_smollm2(model_path):
    tokenizer = load_tokenizer(model_path)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("hi").input_ids == [6004]  # nothing put before it
    assert tokenizer.tokenize("in 1969") == ["in", "Ġ", "1", "9", "6", "9"]
    assert tokenizer.tokenize("<|im_start|>a<|im_end|>") == ["<|im_start|>", "a", "<|im_end|>"]
    text = "Grüße, 世界 🙂! don't\n\n 42\t<|endoftext|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_renders_a_conversation(model_path):
    tokenizer = load_tokenizer(model_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
