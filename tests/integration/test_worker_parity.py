"""The oracle for tokens, through whole workers: colocated, split over tcp, chunked, batched.

Greedy text of the default model in fp32 equals that of transformers' `generate`, token for token,
up to ties, which are printed. By default a seeded sample of the prompts runs; with
`BATON_TEST_ALL=1` all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.fakes.paged_model import paged
from tests.fakes.tiny_models import layout_of
from tests.fakes.worker_rig import (
    Client,
    ModelFactory,
    Rig,
    RigConfig,
    generate_request,
    worker_rig,
)
from tests.integration.test_parity import Reference, assert_parity, make_reference
from workers.decode import DecodeConfig
from workers.engine.runners.self_check import check_model
from workers.engine.sampling_params import SamplingParams
from workers.models.errors import ModelNotFoundError
from workers.models.loading import load_tokenizer, load_weights
from workers.models.store import ModelStore, default_cache_dir

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 48
LENGTHS = (10, 17, 33, 48, 64, 100, 129, 200, 256, 333, 500, 640, 777, 1000, 1250, 1500)
"""Of the prompts; some end with a block, some with a chunk."""
RUN_ALL = os.environ.get("BATON_TEST_ALL") == "1"
SAMPLED_LENGTHS = LENGTHS if RUN_ALL else tuple(sorted(random.Random(10).sample(LENGTHS, 4)))
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model under test, and what the reference gave for each prompt."""

    config: RigConfig
    model: ModelFactory
    references: tuple[Reference, ...]


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The default model with its references, which are made before it is changed to be packed."""
    try:
        path = ModelStore(default_cache_dir(os.environ)).resolve("smollm2-135m").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    model = load_weights(path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    text = load_tokenizer(path)(TEXT.read_text()).input_ids
    # Prompts that share no beginning.
    prompts = [text[number * 7 : number * 7 + n] for number, n in enumerate(SAMPLED_LENGTHS)]
    references = tuple(make_reference(model, prompt, NUM_TOKENS) for prompt in prompts)
    layout = layout_of(model, block_size=BLOCK_SIZE)
    check_model(model, layout, max_model_len=2048)
    config = RigConfig(
        layout=layout,
        num_blocks=400,
        max_model_len=2048,
        max_sequences=8,
        step_tokens=512,
        prefill_chunk_tokens=512,
        num_prefill=1,
        decode=DecodeConfig(local_prefill_tokens=1, transfer_deadline_s=600.0),
    )
    return Subject(config=config, model=paged(model, layout), references=references)


async def ask(
    rig: Rig, prompt: Sequence[int], sampling: SamplingParams, by: str
) -> tuple[int, ...]:
    """The tokens of one request; `by` names the pool that must have computed the prompt."""
    client = Client(rig, generate_request(prompt, sampling), patience_s=900.0)
    end = await client.finished()
    assert end.prefilled_by.startswith(by)
    return tuple(client.token_ids)


async def ask_together(
    rig: Rig, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], by: str
) -> list[tuple[int, ...]]:
    """The tokens of several requests that come at once."""
    clients = [
        Client(rig, generate_request(prompt, params, number=number), patience_s=900.0)
        for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]
    ends = [await client.finished() for client in clients]
    assert all(end.prefilled_by.startswith(by) for end in ends)
    return [tuple(client.token_ids) for client in clients]


def eight(references: Sequence[Reference]) -> list[list[Reference]]:
    """In groups of eight, repeated where there are fewer."""
    whole = list(references) * -(-8 // len(references))
    return [whole[start : start + 8] for start in range(0, len(whole), 8)]


async def test_colocated_worker_gives_the_tokens_of_generate(subject):
    async with worker_rig(replace(subject.config, num_prefill=0), model=subject.model) as rig:
        generated = [await ask(rig, ref.prompt, GREEDY, "decode") for ref in subject.references]
        await rig.settled()
    assert_parity(subject.references, generated)


async def test_split_workers_give_the_tokens_of_generate(subject):
    async with worker_rig(subject.config, model=subject.model) as rig:
        generated = [await ask(rig, ref.prompt, GREEDY, "prefill") for ref in subject.references]
        await rig.settled()
        moved = rig.receiver.stats().blocks_published
    assert moved == sum(-(-len(ref.prompt) // BLOCK_SIZE) for ref in subject.references)
    assert_parity(subject.references, generated)


@pytest.mark.parametrize("num_prefill", [0, 1] if RUN_ALL else [0])
async def test_chunked_and_interleaved_prompts_give_the_tokens_of_generate(subject, num_prefill):
    """Chunks of 64 in steps of 96 rows: prompts share steps with each other and with decode."""
    config = replace(
        subject.config, num_prefill=num_prefill, step_tokens=96, prefill_chunk_tokens=64
    )
    prompts = [reference.prompt for reference in subject.references]
    by = "prefill" if num_prefill else "decode"
    async with worker_rig(config, model=subject.model) as rig:
        generated = await ask_together(rig, prompts, [GREEDY] * len(prompts), by)
        await rig.settled()
    assert_parity(subject.references, generated)


async def test_eight_at_once_get_the_tokens_of_generate(subject):
    async with worker_rig(subject.config, model=subject.model) as rig:
        for group in eight(subject.references):
            prompts = [reference.prompt for reference in group]
            generated = await ask_together(rig, prompts, [GREEDY] * 8, "prefill")
            assert_parity(group, generated)
        await rig.settled()


async def test_sampled_tokens_are_the_same_alone_in_a_batch_and_split(subject):
    """A draw is a function of seed and position alone."""
    num_tokens = 24 if RUN_ALL else 8
    references = eight(subject.references)[0]
    prompts = [reference.prompt[: 20 + 9 * i] for i, reference in enumerate(references)]
    sampling = [
        SamplingParams(max_tokens=num_tokens, temperature=0.8, top_p=0.9, seed=1000 + i)
        for i in range(8)
    ]
    async with worker_rig(replace(subject.config, num_prefill=0), model=subject.model) as rig:
        alone = [
            await ask(rig, prompt, params, "decode")
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        together = await ask_together(rig, prompts, sampling, "decode")
    async with worker_rig(subject.config, model=subject.model) as rig:
        split = await ask_together(rig, prompts, sampling, "prefill")
    assert len(set(alone)) == 8
    assert together == alone
    assert split == alone
