"""Turns a GGUF file of the Llama family into an ordinary Hugging Face directory, at pull time.

Reads the tensors one at a time from the mapped file, so no more than the converted weights and
one tensor in fp32 are in memory. transformers can load GGUF too, but needs accelerate for it,
refuses to save the result ("quantized with gguf"), and loses the tokenizer's splitting of digits,
which changes the tokens of "a  12"; the mapping below is all that a Llama model needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from workers.models.errors import ModelFormatError

__all__ = ["convert"]

TensorProgress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_STORED_DTYPE = torch.bfloat16
"""Half of fp32 in size (269 MB for SmolLM2), what SmolLM2 was published in, and the one dtype in
which fp32 and bf16 workers compute from the very same numbers. Against fp32 the rounding costs a KL
of 7e-5 (argmax agrees at 99.4 % of 2048 positions; fp16: 3e-6, 99.9 %), a twentieth of what bf16
arithmetic costs (1.4e-3, 96.4 %); the mean negative log-likelihood goes from 3.4653 to 3.4656.
"""

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

# GGUF's token types (llama.cpp, llama_token_type).
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


def convert(source: Path, target: Path, *, progress: TensorProgress | None = None) -> None:
    """Write the model in GGUF file `source` to directory `target`, for plain from_pretrained."""
    try:
        reader = GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{source.name} cannot be read as a GGUF file: {error}.") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelFormatError(
            f"{source.name} holds the architecture {architecture!r}; only 'llama' can be converted."
        )
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _build_config(fields, is_tied=is_tied)
    tokenizer = _build_tokenizer(fields, context_length=config.max_position_embeddings)
    weights = _read_weights(reader, config, progress)
    _check_weights(weights, config)

    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # safetensors keeps its files to their owner, which would lock others out of a shared cache.
    config.save_pretrained(target)
    shutil.copymode(target / "config.json", target / "model.safetensors")
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _build_config(fields: Mapping[str, Any], *, is_tied: bool) -> Any:
    num_attention_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    eos_token_id = fields["tokenizer.ggml.eos_token_id"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_attention_heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields.get("llama.rope.dimension_count", hidden_size // num_attention_heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=_shortest_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=is_tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=eos_token_id,
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id", eos_token_id),
        dtype=_STORED_DTYPE,
    )


def _shortest_float(value: float) -> float:
    """Undo what a 32-bit float does to a decimal: 9.999999747378752e-06 was written as 1e-05."""
    return float(f"{value:.7g}")


def _read_weights(
    reader: Any, config: Any, progress: TensorProgress | None
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors, start=1):
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith("attn_q.weight"):
            values = _restore_rotary_order(values, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _restore_rotary_order(values, config.num_key_value_heads)
        weights[_hugging_face_name(tensor.name)] = values.to(_STORED_DTYPE).contiguous()
        if progress is not None:
            progress(done, total)
    return weights


def _hugging_face_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in _BLOCK_TENSORS:
        raise ModelFormatError(f"The GGUF file holds a tensor {name!r} that a Llama model lacks.")
    return f"model.layers.{layer}.{_BLOCK_TENSORS[part]}"


def _restore_rotary_order(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF has a rotary pair in neighbouring rows; transformers has it head_dim / 2 rows apart."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _check_weights(weights: Mapping[str, torch.Tensor], config: Any) -> None:
    """Every parameter of the model is there in its shape, and nothing else."""
    with torch.device("meta"):
        expected = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    actual = {name: tensor.shape for name, tensor in weights.items()}
    if actual != expected:
        wrong = sorted(name for name in actual | expected if actual.get(name) != expected.get(name))
        raise ModelFormatError(
            f"The GGUF file's tensors do not match its configuration: {len(wrong)} differ, "
            f"the first is {wrong[0]}."
        )


def _build_tokenizer(fields: Mapping[str, Any], *, context_length: int) -> Any:
    pre_tokenizer = fields.get("tokenizer.ggml.pre")
    if fields.get("tokenizer.ggml.model") != "gpt2" or pre_tokenizer != "smollm":
        raise ModelFormatError(
            f"The GGUF file's tokenizer is {fields.get('tokenizer.ggml.model')!r} with "
            f"{pre_tokenizer!r} splitting; only 'gpt2' with 'smollm' can be converted."
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN):
            tokenizer.add_tokens(
                [AddedToken(token, normalized=False, special=kind == _CONTROL_TOKEN)]
            )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
    )
