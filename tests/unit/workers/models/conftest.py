from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt", "ĠĠ"]
MERGES = ["h e", "Ġ t", "Ġ Ġ"]


def make_tiny_llama(**options) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **options,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    # Values that bf16 holds exactly: storing them loses nothing, so equality can be asserted.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.01 * torch.randn_like(parameter)).bfloat16())
    return model


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.fixture
def tiny_model() -> LlamaForCausalLM:
    return make_tiny_llama()


@pytest.fixture
def tiny_directory(tmp_path: Path, tiny_model: LlamaForCausalLM) -> Path:
    path = tmp_path / "tiny"
    tiny_model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path
