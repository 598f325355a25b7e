"""A runner whose weights and pool are on another device: everything a step makes is there too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from kv_transfer.geometry import BlockId
from tests.fakes.pretend_device import DEVICE, PretendDevice
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from workers.engine.block_table import BlockTable
from workers.engine.build import build_runner
from workers.engine.kv_cache import KVCache
from workers.engine.model_runner import RaggedModelRunner
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import PromptScoring, ScheduledSequence, SequenceId, StepPlan, StepResult
from workers.engine.token_counts import TokenCounts
from workers.models.loading import GenerationDefaults, ModelInfo
from workers.runner_choice import Architecture

BLOCK_SIZE = 4
BLOCKS = 12
"""Of a sequence in each group."""

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
FREE = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
NARROW = SamplingParams(
    max_tokens=9, temperature=0.9, seed=7, top_k=40, top_p=0.9, min_p=0.01, logprobs=2
)
ADJUSTED = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    seed=5,
    top_p=0.99,
    logit_bias=((3, 2.0), (9, -4.0)),
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    min_tokens=9,
    stop_token_ids=frozenset({4, 5}),
)


def tokens(sequence_id: int, start: int, end: int) -> tuple[int, ...]:
    numbers = np.random.default_rng(sequence_id).integers(0, 256, MAX_MODEL_LEN)
    return tuple(numbers[start:end].tolist())


def share(
    sequence_id: int,
    start: int,
    end: int,
    sampling: SamplingParams | None,
    num_groups: int,
    scoring: PromptScoring | None = None,
) -> ScheduledSequence:
    counts = TokenCounts(tokens(sequence_id, 0, end))
    counts.add(7)
    return ScheduledSequence(
        sequence_id=SequenceId(sequence_id),
        token_ids=tokens(sequence_id, start, end),
        start=start,
        block_tables=tuple(
            BlockTable(
                block_ids=tuple(
                    BlockId((group * BLOCKS + j) * 4 + sequence_id) for j in range(BLOCKS)
                )
            )
            for group in range(num_groups)
        ),
        sampling=sampling,
        num_output_tokens=1,
        seen=counts.seen(),
        scoring=scoring,
    )


def plans(num_groups: int) -> list[StepPlan]:
    """Chunks and whole prompts; streams alone, alike and of unlike lengths; both in one step."""
    scoring = PromptScoring(token_ids=tokens(0, 1, 22), num_top=3)
    steps = [
        [(0, 0, 21, None, scoring), (1, 0, 2, FREE, None)],
        [(1, 2, 3, NARROW, None), (2, 0, 9, ADJUSTED, None), (0, 21, 30, NARROW, None)],
        [(1, 3, 4, ADJUSTED, None), (2, 9, 10, FREE, None), (0, 30, 31, GREEDY, None)],
        [(3, 0, 5, None, None)],
    ]
    return [
        StepPlan(
            step_id=step_id,
            sequences=tuple(
                share(number, start, end, sampling, num_groups, scored)
                for number, start, end, sampling, scored in step
            ),
        )
        for step_id, step in enumerate(steps)
    ]


def run(model: Any, device: torch.device) -> tuple[list[StepResult], str]:
    """What each plan gives, and by which tier."""
    layout = layout_of(model, block_size=BLOCK_SIZE)
    config = model.config
    info = ModelInfo(
        architecture=type(model).__name__,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=config.vocab_size,
        context_length=MAX_MODEL_LEN,
        weights_dtype="float32",
        weights_size_bytes=0,
        num_parameters=0,
        eos_token_ids=(),
        generation_defaults=GenerationDefaults(),
        licence=None,
        weights_digest="d",
        architecture_facts=Architecture(model_type=config.model_type),
    )
    num_groups = len(layout.groups)
    runner, kv_cache = build_runner(
        model,
        info=info,
        layout=layout,
        num_blocks=4 * BLOCKS * num_groups,
        threads=torch.get_num_threads(),
        device=device,
    )
    assert kv_cache.device == device
    return [runner.execute(plan) for plan in plans(num_groups)], runner.choice.tier


@pytest.mark.parametrize(
    ("family", "tier"),
    [("llama", "llama_shaped"), ("gemma2", "llama_shaped"), ("starcoder2", "stock")],
)
def test_steps_on_another_device_give_what_they_give_on_the_cpu(family: str, tier: str) -> None:
    model = make_model(family, SERVED[family])
    expected, _ = run(copy.deepcopy(model), torch.device("cpu"))

    with PretendDevice():
        found, found_tier = run(model.to(DEVICE), DEVICE)

    assert found_tier == tier
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert not any(result.failed for result in found)
    for there, here in zip(found, expected, strict=True):
        assert there.logprobs.keys() == here.logprobs.keys()
        for sequence_id, scored in here.prompt_logprobs.items():
            ours = there.prompt_logprobs[sequence_id]
            assert [row.rank for row in ours] == [row.rank for row in scored]


def test_tensors_of_the_other_device_and_of_the_cpu_do_not_mix() -> None:
    with PretendDevice():
        there = torch.arange(4).to(DEVICE)

        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.arange(4)
        with pytest.raises(RuntimeError, match="two devices"):
            there[torch.arange(2)]
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert (there + 1).tolist() == [1, 2, 3, 4]


def test_a_pool_on_another_device_has_no_bytes_to_show() -> None:
    model = make_model("llama", SERVED["llama"])

    with PretendDevice():
        kv_cache = KVCache(layout_of(model, block_size=BLOCK_SIZE), 4, DEVICE, poison=True)

    assert kv_cache.kind == "cuda"
    with pytest.raises(TypeError, match="no host address"):
        kv_cache.block(BlockId(0))


def test_a_step_is_over_when_what_it_wrote_is_written() -> None:
    """A chunk that samples nothing reads nothing back from a GPU, and is granted next."""
    events: list[str] = []

    class Forward:
        tier = "stock"

        def logits(self, meta: object, rows: np.ndarray) -> torch.Tensor:
            events.append("asked for")
            return torch.zeros(len(rows), 8)

    runner = RaggedModelRunner(
        Forward(),  # type: ignore[arg-type]
        block_size=BLOCK_SIZE,
        settle=lambda: events.append("written"),
    )

    runner.execute(StepPlan(step_id=0, sequences=(share(0, 0, 5, None, 1),)))

    assert events == ["asked for", "written"]
