"""Real transformers models of a few thousand random weights, one of each family that matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kv_transfer.geometry import KVLayout
from workers.models.loading import kv_shape, sliding_windows_of

WINDOW = 8
"""Sliding window of the families that have one, in tokens; a few prompts long."""
MAX_MODEL_LEN = 256

_COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    # Wide enough that the likeliest token stands out, as it does in a trained model.
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_GPT2_NAMES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_MODEL_LEN}

_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 4,
}
_SPARSE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_OUTSIDE = "does not go through transformers' interface"
_NO_POSITIONS = "takes no position_ids"
_NOT_ONCE = "each of its 3 layers should attend once"

SERVED: Mapping[str, Mapping[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 24},
    "mistral": {**_GROUPED, "sliding_window": WINDOW},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "gemma2": {
        **_GROUPED,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        **_GROUPED,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma": {**_GROUPED, "head_dim": 16},
    "gpt2": _GPT2_NAMES,
    "gpt_neox": {},
    "gpt_oss": {
        **_GROUPED,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {**_GROUPED, "sliding_window": WINDOW},
    "olmo2": _GROUPED,
    "cohere2": {
        **_GROUPED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "granite": _GROUPED,
    "smollm3": _GROUPED,
    "starcoder2": {**_GROUPED, "sliding_window": WINDOW},
    "stablelm": _GROUPED,
    "deepseek_v2": {
        **_LATENT,
        **_SPARSE,
        "qk_nope_head_dim": 8,
        "v_head_dim": 24,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        **_SPARSE,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    },
    "phi": {},
    "gptj": {**_GPT2_NAMES, "rotary_dim": 8},
    "olmo3": {**_GROUPED, "sliding_window": WINDOW},
    "nemotron": _GROUPED,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "glm4": {**_GROUPED, "head_dim": 16},
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
"""Families that the packed runner serves."""

REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "falcon": ({}, _OUTSIDE),
    "bloom": (_GPT2_NAMES, _NO_POSITIONS),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}, _NO_POSITIONS),
    "xglm": ({}, _OUTSIDE),
    "mamba": ({}, _NO_POSITIONS),
    "rwkv": ({}, _NO_POSITIONS),
    "jamba": ({**_GROUPED, "mamba_d_state": 8, "num_experts": 2}, _OUTSIDE),
    "bamba": (
        {**_GROUPED, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
        _OUTSIDE,
    ),
    "granitemoehybrid": (
        {
            **_GROUPED,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
        },
        _NOT_ONCE,
    ),
    "qwen3_next": (
        {
            **_GROUPED,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        _NOT_ONCE,
    ),
    "minimax": ({**_GROUPED, "num_local_experts": 2}, _NOT_ONCE),
    "mamba2": (
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
        _NO_POSITIONS,
    ),
    "gpt_neo": (
        {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]},
        _OUTSIDE,
    ),
    "recurrent_gemma": (_GROUPED, _NOT_ONCE),
    "lfm2": (
        {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"]},
        _NOT_ONCE,
    ),
    "llama4_text": (
        {
            **_GROUPED,
            "head_dim": 16,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
        },
        "the mask of layer 0 is not the causal one",
    ),
    "diffllama": (_GROUPED, _NOT_ONCE),
    "llama": (
        {
            **_GROUPED,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": MAX_MODEL_LEN // 4,
        },
        "when a sequence of 256 tokens is in the batch",
    ),
}
"""Families that it would run wrongly, and what they must be refused for."""


def make_model(family: str, changes: Mapping[str, Any], *, seed: int = 0) -> torch.nn.Module:
    """A random fp32 model, the same for the same arguments."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **changes})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def layout_of(model: torch.nn.Module, *, block_size: int) -> KVLayout:
    """The layout that a model's KV cache has by its configuration."""
    config: Any = model.config
    num_kv_heads, head_dim = kv_shape(config)
    dtype = next(model.parameters()).dtype
    return KVLayout(
        model_digest=config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        sliding_windows=sliding_windows_of(config),
    )
