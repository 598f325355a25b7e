"""A random model that is served as a real one: thin layers, the default model's tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools.baton_server import MODEL
from workers.models.store import ModelStore, default_cache_dir

__all__ = ["make_tiny_model"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_tiny_model(directory: Path) -> Path:
    """Write a model of two layers, whose steps take about 2 ms; always the same one.

    Raises `ModelNotFoundError` where the default model, whose tokenizer it has, is not here.
    """
    model = ModelStore(default_cache_dir(os.environ)).resolve(MODEL).path
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, directory)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=2,
        # Wide enough that the likeliest token stands out, as it does in a trained model.
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
