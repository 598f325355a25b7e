"""The decoder of our own beside the stock modules, layer by layer: small mistakes, and none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.parity.subjects import telling_model
from workers.engine.runners.decoder_layer import RmsNorm
from workers.engine.runners.layer_comparison import compare_layers
from workers.engine.runners.llama_shaped import LlamaShapedDecoder
from workers.engine.runners.self_check import check_model
from workers.errors import UnsupportedModelError
from workers.runner_choice import LLAMA_SHAPED_TYPES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

Plant = Callable[[LlamaShapedDecoder], None]


def compare(model: torch.nn.Module, plant: Plant | None = None) -> None:
    layout = layout_of(model, block_size=16)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)
    decoder = LlamaShapedDecoder(model, checked.scorings)
    if plant is not None:
        plant(decoder)
    compare_layers(model, decoder, checked.reference, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted(LLAMA_SHAPED_TYPES))
def test_a_right_decoder_is_right_in_every_dtype(family, dtype):
    compare(make_model(family, SERVED[family], seed=1).to(dtype))
    compare(telling_model(family, seed=2).to(dtype))


def in_layer(change, index: int = 1) -> Plant:
    """A mistake in one layer of three."""

    def plant(decoder):
        layers = list(decoder.layers)
        layers[index] = change(layers[index])
        decoder.layers = tuple(layers)

    return plant


def in_scoring(change) -> Plant:
    return in_layer(lambda layer: replace(layer, scoring=change(layer.scoring)))


def wrong_embedding(decoder):
    decoder.embedding_scale *= 1.02


def wrong_head(decoder):
    decoder.logits_divisor *= 1.02


def wrong_norm(layer):
    norm = layer.before_mlp
    return replace(layer, before_mlp=RmsNorm(weight=1.03 * norm.weight, eps=norm.eps))


PLANTS = {
    "embedding 2 % too large": ("llama", wrong_embedding, "the embedding"),
    "logits 2 % too small": ("llama", wrong_head, "the head"),
    "layer adds 2 % too much": (
        "llama",
        in_layer(lambda layer: replace(layer, residual_scale=1.02 * layer.residual_scale)),
        "layer 1",
    ),
    "multiplier read 2 % too small": (
        "granite",
        in_layer(lambda layer: replace(layer, residual_scale=0.98 * layer.residual_scale)),
        "layer 1",
    ),
    "norm 3 % too large": ("qwen3", in_layer(wrong_norm), "layer 1"),
    "attention 5 % too sharp": (
        "llama",
        in_scoring(lambda scoring: replace(scoring, scale=1.05 * scoring.scale)),
        "layer 1",
    ),
    "window of 7 tokens": (
        "mistral",
        in_scoring(lambda scoring: replace(scoring, sliding_window=7)),
        "layer 1",
    ),
    "no softcap": (
        "gemma2",
        in_scoring(lambda scoring: replace(scoring, softcap=None)),
        "layer 1",
    ),
    "no rotation": (
        "smollm3",
        in_layer(lambda layer: replace(layer, is_rotated=not layer.is_rotated)),
        "layer 1",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_small_mistake_is_seen_in_every_dtype(plant, dtype):
    family, change, part = PLANTS[plant]
    model = make_model(family, SERVED[family]).to(dtype)

    with pytest.raises(UnsupportedModelError, match=f"{part} of the decoder differs by"):
        compare(model, change)
