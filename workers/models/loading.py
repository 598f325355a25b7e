"""A model's directory -> its facts, its weights on a device, its tokenizer.

Loads safetensors only and never code from the model's directory. Knows nothing of engines: what
attention is used and in which dtype is the caller's choice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from workers.models.errors import ModelFormatError, ModelNotFoundError
from workers.models.generation_config import (
    GenerationDefaults,
    read_eos_token_ids,
    read_generation_defaults,
    read_json,
)
from workers.models.store import RECORD_NAME, check_model_directory
from workers.runner_choice import Architecture, architecture_of

__all__ = [
    "GenerationDefaults",
    "ModelInfo",
    "kv_shape",
    "load_model_info",
    "load_tokenizer",
    "load_weights",
    "sliding_windows_of",
]


_SAMPLE_BYTES = 4096
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known of a model before its weights are read."""

    architecture: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    weights_dtype: str  # as stored, in torch's spelling
    weights_size_bytes: int
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    licence: str | None
    weights_digest: str
    architecture_facts: Architecture
    sliding_windows: tuple[int | None, ...] = ()  # by layer; empty if none has one


def load_model_info(path: Path) -> ModelInfo:
    """The model's facts, from its configuration and the headers of its weights."""
    _check_directory(path)
    whole = _load_config(path)
    config = _text_config(whole, path)
    record = read_json(path / RECORD_NAME)
    tensors = sorted(_read_headers(path), key=lambda tensor: tensor.name)
    num_kv_heads, head_dim = kv_shape(config)
    return ModelInfo(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        sliding_windows=sliding_windows_of(config),
        weights_dtype=_main_dtype(tensors),
        weights_size_bytes=sum(tensor.size_bytes for tensor in tensors),
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        eos_token_ids=_eos_token_ids(path, default=config.eos_token_id),
        generation_defaults=read_generation_defaults(path),
        licence=record.get("licence"),
        weights_digest=_weights_digest(tensors),
        architecture_facts=architecture_of(whole.to_dict()),
    )


def kv_shape(config: Any) -> tuple[int, int]:
    """(kv heads, head size) of a text configuration's keys and values, as blocks hold them.

    The larger size, where keys and values differ: latent attention (DeepSeek) is computed with its
    keys and values expanded, one of each for every query head.
    """
    heads: int = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) is not None:
        return heads, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def load_weights(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str,
) -> nn.Module:
    """The model on `device`, for inference; every parameter comes from the checkpoint."""
    _check_directory(path)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise ModelFormatError(f"The weights in {path} cannot be read: {error}") from error
    # transformers fills what the checkpoint lacks with random numbers and a warning.
    if missing := sorted([*loading["missing_keys"], *map(str, loading["mismatched_keys"])]):
        raise ModelFormatError(
            f"The checkpoint in {path} lacks {len(missing)} parameters of its model, "
            f"the first is {missing[0]}."
        )
    module: nn.Module = model
    return module.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer; a fast one, which the incremental detokenizer needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelFormatError(f"The tokenizer in {path} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelFormatError(
            f"The tokenizer in {path} has no fast version (tokenizer.json); Baton needs one."
        )
    return tokenizer


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelNotFoundError(f"There is no model directory {path}.")
    check_model_directory(path)


def _load_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelFormatError(f"The configuration in {path} cannot be used: {error}") from error
    return config


def _text_config(config: Any, path: Path) -> Any:
    """The part that is the language model, which says all that is needed of it."""
    text_config = config.get_text_config(decoder=True)
    for name in (
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ):
        if getattr(text_config, name, None) is None:
            raise ModelFormatError(f"The configuration in {path} does not say {name}.")
    # A composite model names its architecture on the outside only.
    text_config.architectures = text_config.architectures or config.architectures
    return text_config


def sliding_windows_of(config: Any) -> tuple[int | None, ...]:
    """By layer, how many tokens one sees; empty if every layer sees everything.

    Families name the kinds of their layers, or have one window for all. What a layer then really
    asks of its attention is compared with the KV layout when the model is loaded.
    """
    window = getattr(config, "sliding_window", None)
    if not window:
        return ()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _eos_token_ids(path: Path, *, default: int | list[int] | None) -> tuple[int, ...]:
    """The ids that the files name, else those of the configuration class.

    A class has a default of its own (Llama: 2), which may be any word of this model's vocabulary;
    it counts only where no file says anything.
    """
    written = read_eos_token_ids(path)
    if written or default is None:
        return written
    return (default,) if isinstance(default, int) else tuple(default)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTensor:
    """One tensor as a safetensors header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def _read_headers(path: Path) -> Iterator[_StoredTensor]:
    for file in _weight_files(path):
        try:
            with file.open("rb") as stream:
                file_size = os.fstat(stream.fileno()).st_size
                header_size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(header_size, file_size)))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                if 8 + header_size + end > file_size:
                    raise ModelFormatError(f"{file} is cut short: {name} lies beyond its end.")
                yield _StoredTensor(
                    name=name,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    file=file,
                    offset=8 + header_size + start,
                    size_bytes=end - start,
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFormatError(
                f"{file} cannot be read as a safetensors file: {error}"
            ) from error


def _weight_files(path: Path) -> list[Path]:
    """The files that transformers would load: one, or the shards that the index names."""
    index = read_json(path / "model.safetensors.index.json")
    if weight_map := index.get("weight_map"):
        return [path / name for name in sorted(set(weight_map.values()))]
    return [path / "model.safetensors"]


def _main_dtype(tensors: list[_StoredTensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.num_elements
    if not sizes:
        raise ModelFormatError("The model's safetensors files hold no tensors.")
    name = sizes.most_common(1)[0][0]
    return _DTYPE_NAMES.get(name, name)


def _weights_digest(tensors: list[_StoredTensor]) -> str:
    """Tells weights apart without reading them all: against mistakes, not against an attacker.

    Covers each tensor's name, dtype and shape, and of its bytes the first, middle and last 4 KiB.
    Two trainings differ in nearly every value of the tensors they touch, so that is enough to keep
    the KV of one model from being used by another. It does not depend on how the tensors are spread
    over files, and takes milliseconds, where a hash of everything takes seconds for each GB.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.name}|{tensor.dtype}|{tensor.shape}\n".encode())
        last = max(0, tensor.size_bytes - _SAMPLE_BYTES)
        with tensor.file.open("rb") as stream:
            for start in sorted({0, last // 2, last}):
                stream.seek(tensor.offset + start)
                digest.update(stream.read(min(_SAMPLE_BYTES, tensor.size_bytes)))
    return digest.hexdigest()
