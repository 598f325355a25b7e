"""The oracle for tokens: greedy output equals that of transformers' `generate`, on every path.

A small driver of this file's own calls the runner, so that only the runner can be at fault. No tie
is allowed: no prompt here has one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from kv_transfer.geometry import BlockId
from tests.fakes.tiny_models import MAX_MODEL_LEN, REFUSED, SERVED, layout_of, make_model
from tests.parity.references import Reference, make_reference
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.block_table import BlockTable
from workers.engine.build import build_runner, make_forward
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.runners.self_check import check_model
from workers.engine.runners.stock import StockForward
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import ScheduledSequence, SequenceId, StepPlan
from workers.errors import UnsupportedModelError
from workers.models.errors import ModelNotFoundError
from workers.models.loading import load_model_info, load_tokenizer, load_weights
from workers.models.store import ModelStore, default_cache_dir
from workers.runner_choice import LLAMA_SHAPED_TYPES

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK_SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Two threads that wait for each other take many times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(slots=True, kw_only=True)
class Running:
    """One sequence as the driver sees it."""

    tokens: list[int]
    num_prompt_tokens: int
    end: int
    joins_at: int
    block_tables: tuple[BlockTable, ...]
    computed: int = 0


def drive(
    runner,
    references: Sequence[Reference],
    num_blocks: int,
    block_size: int,
    *,
    chunk=10_000,
    lag=0,
    num_groups=1,
) -> list[tuple[int, ...]]:
    """Generate for all prompts, batched; prompt i joins at step i * lag, in chunks."""
    shuffled = torch.randperm(num_blocks, generator=torch.manual_seed(1)).tolist()
    running = []
    for i, reference in enumerate(references):
        end = len(reference.prompt) + len(reference.tokens)
        needed = -(-end // block_size)
        running.append(
            Running(
                tokens=list(reference.prompt),
                num_prompt_tokens=len(reference.prompt),
                end=end,
                joins_at=i * lag,
                block_tables=tuple(
                    BlockTable(block_ids=tuple(BlockId(shuffled.pop()) for _ in range(needed)))
                    for _ in range(num_groups)
                ),
            )
        )
    for step_id in range(10_000):
        live = {
            SequenceId(i): sequence
            for i, sequence in enumerate(running)
            if len(sequence.tokens) < sequence.end and sequence.joins_at <= step_id
        }
        if not live and all(len(sequence.tokens) == sequence.end for sequence in running):
            break
        if not live:
            continue
        scheduled = [_schedule(key, sequence, chunk) for key, sequence in live.items()]
        scheduled.sort(key=lambda sequence: len(sequence.token_ids) > 1)
        result = runner.execute(StepPlan(step_id=step_id, sequences=tuple(scheduled)))
        assert not result.failed
        for sequence in scheduled:
            live[sequence.sequence_id].computed = sequence.end
        for key, token_id in result.token_ids.items():
            live[key].tokens.append(token_id)
    return [tuple(sequence.tokens[sequence.num_prompt_tokens :]) for sequence in running]


def _schedule(sequence_id: SequenceId, sequence: Running, chunk: int) -> ScheduledSequence:
    start = sequence.computed
    end = min(start + chunk, len(sequence.tokens))
    return ScheduledSequence(
        sequence_id=sequence_id,
        token_ids=tuple(sequence.tokens[start:end]),
        start=start,
        block_tables=sequence.block_tables,
        sampling=GREEDY if end == len(sequence.tokens) else None,
    )


def assert_parity(references: Sequence[Reference], generated: Sequence[tuple[int, ...]]) -> None:
    """Equal, token for token; a difference says how close the reference's likeliest two were."""
    for i, (reference, tokens) in enumerate(zip(references, generated, strict=True)):
        assert len(tokens) == len(reference.tokens)
        differing = [j for j, token in enumerate(tokens) if token != reference.tokens[j]]
        if differing:
            first = differing[0]
            gap = reference.gaps[first]
            pytest.fail(f"sequence {i} differs from token {first} on, where the gap is {gap:.2e}")


def make_prompts(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    generator = torch.manual_seed(3)
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("family", "tier"),
    [(family, "stock") for family in SERVED]
    + [(family, "llama_shaped") for family in sorted(LLAMA_SHAPED_TYPES)],
)
def test_tiny_model_gives_the_tokens_of_generate(family, tier):
    model = make_model(family, SERVED[family])
    prompts = make_prompts([3, 21, 9, 14], 256)
    references = [make_reference(model, prompt, 12) for prompt in prompts]
    layout = layout_of(model, block_size=BLOCK_SIZE)
    checked = check_model(model, layout, max_model_len=MAX_MODEL_LEN)
    make, _ = make_forward(model, checked, layout)
    if tier == "stock":
        make = partial(StockForward, model)

    for ways in ({}, {"chunk": 5}, {"chunk": 5, "lag": 3}):
        num_groups = len(layout.groups)
        num_blocks = 64 * num_groups
        kv_cache = KVCache(layout, num_blocks, poison=True)
        runner = RaggedModelRunner(make(TorchBackend(kv_cache)), block_size=BLOCK_SIZE)
        assert runner.choice.tier == tier
        generated = drive(runner, references, num_blocks, BLOCK_SIZE, num_groups=num_groups, **ways)
        assert_parity(references, generated)


@pytest.mark.parametrize("family", REFUSED)
def test_tiny_model_that_cannot_be_packed_is_refused(family):
    changes, reason = REFUSED[family]
    model = make_model(family, changes)
    layout = layout_of(model, block_size=BLOCK_SIZE)

    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        check_model(model, layout, max_model_len=MAX_MODEL_LEN)

    assert type(model).__name__ in str(refusal.value)


@pytest.mark.parametrize(
    "changes", [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"alibi": True}], ids=repr
)
def test_every_variant_of_falcon_is_refused(changes):
    model = make_model("falcon", changes)

    with pytest.raises(UnsupportedModelError, match="not go through transformers' interface"):
        check_model(model, layout_of(model, block_size=BLOCK_SIZE), max_model_len=MAX_MODEL_LEN)


def test_chunked_attention_is_right_up_to_its_chunk():
    changes, _ = REFUSED["llama4_text"]
    model = make_model("llama4_text", {**changes, "attention_chunk_size": 32})
    layout = layout_of(model, block_size=BLOCK_SIZE)
    references = [make_reference(model, prompt, 12) for prompt in make_prompts([3, 19], 256)]

    with pytest.raises(UnsupportedModelError, match="the mask of layer 0 is not the causal one"):
        check_model(model, layout, max_model_len=33)
    make, _ = make_forward(model, check_model(model, layout, max_model_len=32), layout)

    runner = RaggedModelRunner(make(TorchBackend(KVCache(layout, 64))), block_size=BLOCK_SIZE)
    assert_parity(references, drive(runner, references, 64, BLOCK_SIZE, chunk=5))


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "List three fruits:",
    "Water boils at a temperature of",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "The quick brown fox jumps over the lazy dog. " * 9,
]


@pytest.fixture(scope="module")
def smollm2():
    """(runner, references) of the default model in fp32."""
    try:
        path = ModelStore(default_cache_dir(os.environ)).resolve("smollm2-135m").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(path)
    model = load_weights(path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    references = [make_reference(model, tokenizer(prompt).input_ids, 24) for prompt in PROMPTS]
    layout = layout_of(model, block_size=16)
    runner, _ = build_runner(
        model,
        info=load_model_info(path),
        layout=layout,
        num_blocks=64,
        threads=1,
    )
    return runner, references


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ways", [{}, {"chunk": 7}, {"lag": 2}, {"chunk": 16, "lag": 3}], ids=lambda ways: repr(ways)
)
def test_default_model_gives_the_tokens_of_generate_for_a_batch(smollm2, ways):
    runner, references = smollm2

    assert_parity(references, drive(runner, references, 64, 16, **ways))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", [10_000, 16, 5])
def test_default_model_gives_the_tokens_of_generate_for_one_sequence(smollm2, chunk):
    runner, references = smollm2

    for reference in references[:3]:
        assert_parity([reference], drive(runner, [reference], 64, 16, chunk=chunk))
