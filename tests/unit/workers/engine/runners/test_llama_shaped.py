"""The decoder of our own beside the stock modules, over the same steps."""

import logging

import numpy as np
import pytest
import torch

from kv_transfer.geometry import BlockId
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from workers.engine.attention.backend import build_metadata
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.block_table import BlockTable
from workers.engine.build import make_forward
from workers.engine.kv_cache import KVCache
from workers.engine.linear import pack_head
from workers.engine.runners.decoder_layer import Linear, read_norm
from workers.engine.runners.llama_shaped import LlamaShapedDecoder, LlamaShapedForward
from workers.engine.runners.self_check import check_model
from workers.engine.runners.stock import StockForward
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.errors import UnsupportedModelError

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
BLOCK_SIZE = 4
LLAMA = SERVED["llama"]

VARIANTS = {
    "plain": ("llama", LLAMA),
    "biases everywhere": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "tied head": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "one kv head": ("llama", {**LLAMA, "num_key_value_heads": 1}),
    "scaled angles": (
        "llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "gelu": ("llama", {**LLAMA, "hidden_act": "gelu"}),
    "bias of queries, keys and values": ("qwen2", SERVED["qwen2"]),
    "norms of heads": ("qwen3", SERVED["qwen3"]),
    "norms of all heads, after the parts": ("olmo2", SERVED["olmo2"]),
    "one matrix, part of the head turned": (
        "phi3",
        {
            **SERVED["phi3"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "softcaps and four norms": ("gemma2", {**SERVED["gemma2"], "final_logit_softcapping": 3.0}),
    "two kinds of angles": (
        "gemma3_text",
        {
            **SERVED["gemma3_text"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "multipliers": (
        "granite",
        {
            **SERVED["granite"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "layers without angles": ("smollm3", {**SERVED["smollm3"], "no_rope_layers": [1, 0, 1]}),
}
STEPS = [[(0, 0, 3)], [(1, 0, 9), (0, 3, 1)], [(0, 4, 1), (1, 9, 1)], [(0, 5, 20), (1, 10, 6)]]
"""By step, (sequence, start, length): 1 to 26 rows, so every way to multiply them."""


def plan_of(shares, num_groups=1) -> StepPlan:
    """Sequences with eight blocks in each group."""
    return StepPlan(
        step_id=0,
        sequences=tuple(
            ScheduledSequence(
                sequence_id=SequenceId(i),
                token_ids=tuple((17 * i + 5 * j + 1) % 256 for j in range(start, start + length)),
                start=start,
                block_tables=tuple(
                    BlockTable(
                        block_ids=tuple(BlockId(2 * (j * num_groups + group) + i) for j in range(8))
                    )
                    for group in range(num_groups)
                ),
                sampling=GREEDY,
            )
            for i, start, length in shares
        ),
    )


def both_sides(model):
    """(stock, own, their caches): two forward passes of one model."""
    layout = layout_of(model, block_size=BLOCK_SIZE)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)
    num_blocks = 16 * len(layout.groups)
    caches = [KVCache(layout, num_blocks, poison=True) for _ in range(2)]
    stock = StockForward(model, TorchBackend(caches[0]))
    decoder = LlamaShapedDecoder(model, checked.scorings)
    return stock, LlamaShapedForward(decoder, TorchBackend(caches[1])), caches


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_kv_are_those_of_the_stock_modules(variant):
    model = make_model(*VARIANTS[variant])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.rand_like(parameter))  # they start as zeros and ones
    stock, own, caches = both_sides(model)
    num_groups = len(caches[0].layout.groups)

    for shares in STEPS:
        meta = build_metadata(plan_of(shares, num_groups), BLOCK_SIZE)
        rows = np.arange(len(meta.input_ids))
        expected = stock.logits(meta, rows)
        torch.testing.assert_close(own.logits(meta, rows), expected, rtol=1e-4, atol=1e-4)

    for layer in range(3):
        for theirs, ours in zip(caches[0].layer(layer), caches[1].layer(layer), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("rows", [[7], [2, 9], [9, 2], [], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
def test_logits_are_those_of_the_rows_asked_for(rows):
    stock, own, _ = both_sides(make_model("llama", LLAMA))
    meta = build_metadata(plan_of([(0, 0, 4), (1, 0, 6)]), BLOCK_SIZE)

    logits = own.logits(meta, np.array(rows, dtype=np.int64))

    assert logits.shape == (len(rows), 256)
    torch.testing.assert_close(
        logits, stock.logits(meta, np.arange(10))[rows], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_half_precision_is_right_to_its_precision(family):
    model = make_model(family, SERVED[family]).bfloat16()
    stock, own, caches = both_sides(model)
    plan = plan_of([(0, 0, 9), (1, 0, 5)], len(caches[0].layout.groups))
    meta = build_metadata(plan, BLOCK_SIZE)

    ours, theirs = own.logits(meta, np.arange(14)), stock.logits(meta, np.arange(14))

    assert ours.dtype == torch.bfloat16
    change = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert change < 0.05


def test_no_matrix_is_held_twice():
    model = make_model("llama", {**LLAMA, "attention_bias": True})
    both_sides(model)

    for module in (layer.self_attn for layer in model.model.layers):
        parts = (module.q_proj, module.k_proj, module.v_proj)
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
        assert len({part.bias.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_packed_head_is_used():
    model = make_model("llama", LLAMA)
    stock, own, _ = both_sides(model)
    meta = build_metadata(plan_of([(0, 0, 4)]), BLOCK_SIZE)
    before = stock.logits(meta, meta.sampled_rows)

    assert pack_head(model)

    torch.testing.assert_close(own.logits(meta, meta.sampled_rows), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("bias", [None, torch.arange(24.0)])
def test_a_wide_matrix_gives_the_same_product_either_way_round(num_rows, bias):
    weight, rows = torch.randn(24, 8), torch.randn(num_rows, 8)
    layer = Linear(weight=weight, bias=bias)

    product = layer(rows)

    assert product.is_contiguous()
    torch.testing.assert_close(product, torch.nn.functional.linear(rows, weight, bias))


def test_a_layer_of_another_shape_is_refused():
    model = make_model("qwen3_moe", SERVED["qwen3_moe"])
    layout = layout_of(model, block_size=BLOCK_SIZE)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)

    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeDecoderLayer is not Llama-shaped"):
        LlamaShapedDecoder(model, checked.scorings)


def make_checked(family, changes):
    model = make_model(family, changes)
    layout = layout_of(model, block_size=BLOCK_SIZE)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)
    return model, checked, layout


def test_the_decoder_of_our_own_gives_way_where_it_differs(monkeypatch, caplog):
    """A norm read as another kind's, as after a change in transformers."""
    model, checked, layout = make_checked("gemma2", SERVED["gemma2"])
    with torch.no_grad():
        model.model.norm.weight.add_(torch.rand_like(model.model.norm.weight))

    def read_without_the_one(module):
        norm = read_norm(module)
        return type(norm)(weight=norm.weight - 1.0, eps=norm.eps)

    monkeypatch.setattr("workers.engine.runners.llama_shaped.read_norm", read_without_the_one)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)
    with caplog.at_level(logging.INFO, logger="workers.engine.build"):
        make, choice = make_forward(model, checked, layout)

    assert make(TorchBackend(KVCache(layout, 16))).tier == "stock"
    assert (choice.tier, choice.cause) == ("stock", "own_differs")
    assert "architecture=Gemma2ForCausalLM tier=stock cause=own_differs" in caplog.text
    assert "the head of the decoder differs by" in caplog.text


def test_the_stock_modules_still_work_after_the_decoder_gave_way(monkeypatch):
    model, checked, layout = make_checked("qwen2", SERVED["qwen2"])
    meta = build_metadata(plan_of([(0, 0, 4), (1, 0, 6)]), BLOCK_SIZE)
    before = StockForward(model, TorchBackend(KVCache(layout, 16))).logits(meta, np.arange(10))

    def broken(self, meta, rows):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(LlamaShapedForward, "logits", broken)
    make, choice = make_forward(model, checked, layout)
    forward = make(TorchBackend(KVCache(layout, 16)))

    assert forward.tier == "stock"
    assert choice.cause == "own_failed"
    assert choice.reason == "the decoder of our own failed: RuntimeError"
    assert torch.equal(forward.logits(meta, np.arange(10)), before)


@pytest.mark.parametrize(
    ("family", "tier", "cause"),
    [("llama", "llama_shaped", "verified_family"), ("gpt2", "stock", "other_family")],
)
def test_the_log_says_which_tier_it_is_and_why(family, tier, cause, caplog):
    model, checked, layout = make_checked(family, SERVED[family])

    with caplog.at_level(logging.INFO, logger="workers.engine.build"):
        make, choice = make_forward(model, checked, layout)

    assert make(TorchBackend(KVCache(layout, 16))).tier == tier
    assert (choice.tier, choice.cause) == (tier, cause)
    expected = f"architecture={type(model).__name__} tier={tier} cause={cause} reason="
    assert expected in caplog.text
