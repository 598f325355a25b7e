"""The models under test, each with its prompts and what the reference gave for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kv_transfer.geometry import KVLayout
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.fakes.worker_rig import ModelFactory
from tests.parity.prompts import document, document_lengths, questions, random_prompts
from tests.parity.references import Reference, ReferenceCache
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.build import make_forward
from workers.engine.kv_cache import KVCache
from workers.engine.linear import pack_head
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.self_check import check_model
from workers.models.loading import load_tokenizer, load_weights

__all__ = ["Extent", "Subject", "default_model_subject", "telling_model", "tiny_subject"]

_TINY_BLOCK_SIZE = 4
_TINY_LENGTHS = (3, 150, 9, 21, 16, 77, 1, 40, 64, 5, 190, 33, 12, 100, 28, 7)
"""Around every edge: a block, a window, a chunk, and one token alone."""
_LONGEST_QUESTION = 400
"""Tokens; MT-Bench has a few whole documents, which the documents stand for already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of everything a run compares."""

    name: str
    num_prompts: int
    """Of the default model, from each source."""
    num_tokens: int
    longest_document: int
    """Prompt tokens."""
    num_tiny_prompts: int
    num_tiny_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, ready to be put into workers, and its references."""

    name: str
    model: ModelFactory
    layout: KVLayout
    max_model_len: int
    references: tuple[Reference, ...]


def telling_model(
    family: str, changes: Mapping[str, Any] = MappingProxyType({}), *, seed: int = 0
) -> torch.nn.Module:
    """A random model of a family whose tokens depend on everything that it computes.

    A new model's biases are 0 and its norms 1, so that a runner that forgot them would look right:
    here every vector gets values of its own. With a tied head it may say its last token for ever,
    whatever its layers do: here the head is not tied.
    """
    config = {**SERVED[family], "tie_word_embeddings": False, **changes}
    model = make_model(family, config, seed=seed)
    generator = torch.manual_seed(seed)
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("_bias")
    }
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return model


def tiny_subject(family: str, extent: Extent, cache: Path) -> Subject:
    """A random model of a family, with prompts longer than its window of attention."""
    model = telling_model(family)
    prompts = random_prompts(1, _TINY_LENGTHS[: extent.num_tiny_prompts], 256)
    return _subject(
        family,
        model,
        prompts,
        num_tokens=extent.num_tiny_tokens,
        block_size=_TINY_BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        cache=cache,
    )


def default_model_subject(
    path: Path, source: str, extent: Extent, cache: Path, data: Path | None
) -> Subject:
    """The default model in fp32; with MT-Bench's questions if there is data, else documents."""
    tokenizer = load_tokenizer(path)

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer(text, verbose=False).input_ids
        return ids

    prompts = _documents(tokenize, extent) if data is None else _asked(tokenizer, data, extent)
    model = load_weights(path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    return _subject(
        f"smollm2 {source}",
        model,
        prompts,
        num_tokens=extent.num_tokens,
        block_size=16,
        max_model_len=2048,
        cache=cache,
    )


def _documents(tokenize: Callable[[str], Sequence[int]], extent: Extent) -> list[list[int]]:
    lengths = document_lengths(extent.num_prompts, longest=extent.longest_document)
    return [document(seed, length, tokenize) for seed, length in enumerate(lengths)]


def _asked(tokenizer: Callable[..., object], data: Path, extent: Extent) -> list[list[int]]:
    """Seeded questions, as a chat."""
    encoded = []
    for question in questions(data):
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            message, tokenize=False, add_generation_prompt=True
        )
        encoded.append(list(tokenizer(text).input_ids))  # type: ignore[attr-defined]
    short = [ids for ids in encoded if len(ids) <= _LONGEST_QUESTION]
    return random.Random(64).sample(short, extent.num_prompts)


def _subject(
    name: str,
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    block_size: int,
    max_model_len: int,
    cache: Path,
) -> Subject:
    """The model as a worker would load it: checked, and run by the tier that is chosen for it."""
    references = ReferenceCache(cache, model)
    made = tuple(references.get(prompt, num_tokens) for prompt in prompts)
    layout = layout_of(model, block_size=block_size)
    checked = check_model(model, layout, max_model_len=max_model_len)
    pack_head(model)
    forward, _ = make_forward(model, checked, layout)

    def make(num_blocks: int) -> tuple[RaggedModelRunner, KVCache]:
        kv_cache = KVCache(layout, num_blocks, poison=True)
        runner = RaggedModelRunner(forward(TorchBackend(kv_cache)), block_size=block_size)
        return runner, kv_cache

    return Subject(
        name=f"{name} ({make(1)[0].choice.tier})",
        model=make,
        layout=layout,
        max_model_len=max_model_len,
        references=made,
    )
