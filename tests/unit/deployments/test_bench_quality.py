"""The engine's perplexity and divergence, against transformers on the same random model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deployments.bench.errors import BenchInputError, NothingMeasuredError
from deployments.bench.quality import (
    Quality,
    QualityOptions,
    Scorer,
    measure_file,
    measure_quality,
    quality_as_text,
)
from tests.fakes.tiny_models import SERVED, layout_of, make_model
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.stock import StockForward

TOKENS = [(7 * i * i + 3 * i + 11) % 256 for i in range(50)]


def options(**more: object) -> QualityOptions:
    values = {"dtype": "bf16", "max_tokens": 1000, "window_tokens": 24, "chunk_tokens": 7, **more}
    return QualityOptions(**values)  # type: ignore[arg-type]  # each by its name


def make_scorer(model: torch.nn.Module) -> Scorer:
    layout = layout_of(model, block_size=4)
    memory = KVCache(layout, layout.blocks_for(64), poison=True)
    return Scorer(
        RaggedModelRunner(StockForward(model, TorchBackend(memory)), block_size=4), layout
    )


def measure(judged: Scorer, reference: Scorer, chosen: QualityOptions) -> tuple[Quality, int]:
    counts: list[int] = []
    quality = measure_quality(
        TOKENS, judged, reference, model="tiny", options=chosen, on_tokens=counts.append
    )
    return quality, sum(counts)


@torch.inference_mode()
def window_logits(seed: int, window: list[int]) -> torch.Tensor:
    model = make_model("llama", SERVED["llama"], seed=seed)
    logits: torch.Tensor = model(input_ids=torch.tensor([window])).logits[0, :-1]
    return logits


@pytest.mark.parametrize("chunk_tokens", [1, 7, 24, 100])
def test_perplexity_is_that_of_whole_windows_in_transformers(chunk_tokens: int) -> None:
    scorer = make_scorer(make_model("llama", SERVED["llama"]))

    quality, num_computed = measure(scorer, scorer, options(chunk_tokens=chunk_tokens))

    losses = []
    for window in (TOKENS[:24], TOKENS[24:48], TOKENS[48:]):
        targets = torch.tensor(window[1:])
        loss = torch.nn.functional.cross_entropy(window_logits(0, window), targets, reduction="sum")
        losses.append(loss.item())
    assert quality.num_scored == 23 + 23 + 1
    assert quality.perplexity == pytest.approx(math.exp(sum(losses) / 47), rel=1e-4)
    assert num_computed == 50
    assert (quality.kl_mean, quality.kl_max, quality.same_top_share) == (0, 0, 1)


def test_divergence_is_that_of_the_judged_from_the_reference() -> None:
    judged, reference = (make_scorer(make_model("llama", SERVED["llama"], seed=s)) for s in (1, 0))

    quality, _ = measure(judged, reference, options(max_tokens=24))

    ours, theirs = (window_logits(seed, TOKENS[:24]).log_softmax(-1) for seed in (1, 0))
    expected = torch.nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    assert quality.num_scored == 23
    assert quality.kl_mean == pytest.approx(expected.mean().item(), rel=1e-3)
    assert quality.kl_max == pytest.approx(expected.max().item(), rel=1e-3)
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    assert quality.same_top_share == pytest.approx(same)
    assert quality.perplexity != quality.reference_perplexity


def test_a_text_of_one_token_predicts_nothing() -> None:
    scorer = make_scorer(make_model("llama", SERVED["llama"]))

    with pytest.raises(NothingMeasuredError, match="fewer than two"):
        measure(scorer, scorer, options(max_tokens=1))


def test_logits_that_are_no_numbers_give_no_figures() -> None:
    model = make_model("llama", SERVED["llama"])
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    scorer = make_scorer(model)

    with pytest.raises(NothingMeasuredError, match="not finite"):
        measure(scorer, scorer, options())


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(BenchInputError, match="'int3'"):
        options(dtype="int3")


def test_the_text_names_both_perplexities() -> None:
    quality = Quality(
        model="tiny",
        dtype="bf16",
        num_scored=47,
        perplexity=11.0,
        reference_perplexity=10.0,
        kl_mean=0.001,
        kl_p99=0.01,
        kl_max=0.02,
        same_top_share=0.975,
    )

    text = quality_as_text(quality)

    assert "tiny in bf16, 47 tokens predicted" in text
    assert "perplexity 11.0000; in fp32 10.0000, ratio 1.10000" in text
    assert "mean 1.00e-03, p99 1.00e-02, max 2.00e-02 nats; same likeliest token 97.50%" in text
    assert json.loads(json.dumps(quality.as_json()))["perplexity"] == 11.0


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tiny"
    make_model("llama", SERVED["llama"]).save_pretrained(folder)  # type: ignore[operator]  # transformers'
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_file_is_judged_from_the_models_directory(
    model_directory: Path, tmp_path: Path, dtype: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2)

    quality = measure_file(
        text,
        str(model_directory),
        options(dtype=dtype, max_tokens=60, threads=1),
        environ={"BATON_CACHE": str(tmp_path / "cache")},
        console=Console(quiet=True),
    )

    assert quality.num_scored == 23 + 23 + 11
    assert math.isfinite(quality.perplexity)
    assert (quality.kl_max == 0) is (dtype == "fp32")
    assert quality.kl_mean < 0.05


def test_a_window_that_the_model_cannot_hold_is_refused(
    model_directory: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once")

    with pytest.raises(BenchInputError, match="257 tokens does not fit the model's 256"):
        measure_file(
            text,
            str(model_directory),
            options(window_tokens=257),
            environ={"BATON_CACHE": str(tmp_path / "cache")},
            console=Console(quiet=True),
        )


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchInputError, match=r"none\.txt cannot be read"):
        measure_file(
            tmp_path / "none.txt", "tiny", options(), environ={}, console=Console(quiet=True)
        )
