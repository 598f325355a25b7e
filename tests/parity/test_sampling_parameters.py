"""Sampling through whole workers with a real model: alone, in a batch of 16, and split.

All of it in fp32 on a tiny random model, whose every row is cheap; the same for a sample of
requests on the default model, where it is here.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.paged_model import paged
from tests.fakes.reference_sampler import reference_draw
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.fakes.worker_rig import (
    Client,
    ModelFactory,
    RigConfig,
    generate_request,
    worker_rig,
)
from workers.decode_config import DecodeConfig
from workers.engine.attention.interface import use_packed_attention
from workers.engine.runners.self_check import check_model
from workers.engine.sampling_params import SamplingParams
from workers.models.errors import ModelNotFoundError
from workers.models.loading import load_weights
from workers.models.store import ModelStore, default_cache_dir

pytestmark = pytest.mark.timeout(900)

BLOCK_SIZE = 4
NUM_TOKENS = 16
WISHES = [
    {},
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"logit_bias": ((7, 4.0), (9, -100.0))},
    {"min_tokens": 8, "stop_token_ids": frozenset(range(64))},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 1.3, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"top_p": 0.8, "logit_bias": ((3, 2.0),), "repetition_penalty": 0.8},
    {"temperature": 0.0, "logit_bias": ((5, 3.0),), "presence_penalty": 2.0},
]
"""Sixteen requests that ask for different things: the batch of 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model behind workers, and stock transformers' word on it."""

    config: RigConfig
    factory: ModelFactory
    model: torch.nn.Module
    vocabulary: int

    def prompts(self) -> list[list[int]]:
        """Of different lengths; some end with a block, some with a chunk."""
        rng = random.Random(5)
        return [[rng.randrange(self.vocabulary) for _ in range(9 + 7 * i)] for i in range(16)]

    def stock_logits(self, token_ids: list[int]) -> torch.Tensor:
        """fp64 `[tokens, vocabulary]` of the model's own attention."""
        self.model.set_attn_implementation("eager")  # type: ignore[operator]
        try:
            with torch.inference_mode():
                output = self.model(input_ids=torch.tensor([token_ids]), use_cache=False)
        finally:
            use_packed_attention(self.model)
        logits: torch.Tensor = output.logits[0].double()
        return logits


def subject_of(model: torch.nn.Module, max_model_len: int) -> Subject:
    layout = layout_of(model, block_size=BLOCK_SIZE)
    check_model(model, layout, max_model_len=max_model_len)
    config = RigConfig(
        layout=layout,
        num_blocks=1024,
        max_model_len=max_model_len,
        max_sequences=16,
        step_tokens=64,
        prefill_chunk_tokens=24,
        num_prefill=1,
        decode=DecodeConfig(local_prefill_tokens=1, transfer_deadline_s=600.0),
    )
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return Subject(config=config, factory=paged(model, layout), model=model, vocabulary=vocabulary)


def _tiny() -> Subject:
    return subject_of(make_model("llama", SERVED["llama"]), MAX_MODEL_LEN)


def _default() -> Subject:
    try:
        path = ModelStore(default_cache_dir(os.environ)).resolve("smollm2-135m").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    model = load_weights(path, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    return subject_of(model, 512)


@pytest.fixture(
    scope="module",
    params=[_tiny, pytest.param(_default, marks=[pytest.mark.model, pytest.mark.slow])],
)
def subject(request) -> Subject:
    return request.param()


async def answers(
    subject: Subject,
    sampling: list[SamplingParams],
    *,
    num_prefill: int,
    together: bool,
    prompts: list[list[int]] | None = None,
) -> list[Client]:
    """The finished clients of one request for each sampling."""
    config = replace(subject.config, num_prefill=num_prefill)
    async with worker_rig(config, model=subject.factory) as rig:
        clients = []
        for number, asked in enumerate(sampling):
            prompt = (prompts or subject.prompts())[number]
            request = generate_request(prompt, asked, number=number)
            clients.append(Client(rig, request, patience_s=600.0))
            if not together:
                await clients[-1].finished()
        for client in clients:
            end = await client.finished()
            assert end.prefilled_by.startswith("prefill" if num_prefill else "decode")
        await rig.settled()
    return clients


def assert_close(ours: list[TokenLogprobs], others: list[TokenLogprobs]) -> None:
    assert len(ours) == len(others)
    for mine, other in zip(ours, others, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [value for _, value in mine.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-4
        )


def is_tiny(subject: Subject) -> bool:
    return subject.vocabulary < 1000


async def test_a_seed_gives_the_same_tokens_alone_in_a_batch_of_16_and_split(subject):
    """Rows 72 and 73, for every parameter; the log-probabilities with them."""
    num_tokens = NUM_TOKENS if is_tiny(subject) else 6
    sampling = [
        SamplingParams(max_tokens=num_tokens, seed=100 + i, logprobs=3, **wishes)
        for i, wishes in enumerate(WISHES)
    ]

    alone = await answers(subject, sampling, num_prefill=0, together=False)
    batch = await answers(subject, sampling, num_prefill=0, together=True)
    split = await answers(subject, sampling, num_prefill=1, together=True)

    expected = [client.token_ids for client in alone]
    assert [client.token_ids for client in batch] == expected
    assert [client.token_ids for client in split] == expected
    for one, other, third in zip(alone, batch, split, strict=True):
        assert len(one.logprobs) == len(one.token_ids)
        assert_close(other.logprobs, one.logprobs)
        assert_close(third.logprobs, one.logprobs)


async def test_tokens_are_those_of_the_slow_reference_over_stock_logits(subject):
    """From transformers' own logits, in fp64, token by token, penalties counted anew each time."""
    if not is_tiny(subject):
        pytest.skip("the tiny model shows it")
    # With a filter the sampler goes through the likeliest first, as the reference does.
    sampling = [
        SamplingParams(max_tokens=NUM_TOKENS, seed=100 + i, **{"top_k": 200, **wishes})
        for i, wishes in enumerate(WISHES)
        if wishes.get("temperature") != 0.0
    ]

    split = await answers(subject, sampling, num_prefill=1, together=True)

    for client, asked, prompt in zip(split, sampling, subject.prompts(), strict=False):
        logits = subject.stock_logits(prompt + client.token_ids).numpy()
        for place, token_id in enumerate(client.token_ids):
            position = len(prompt) + place
            before = client.token_ids[:place]
            row = logits[position - 1]
            assert token_id == reference_draw(row, asked, position, prompt, before)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_prompt_log_probabilities_are_those_of_a_plain_forward_pass(subject, num_prefill):
    """Row 69: split or colocated, chunked and beside others, within 1e-4 of transformers."""
    prompts = subject.prompts() if is_tiny(subject) else subject.prompts()[:4]
    sampling = [
        SamplingParams(max_tokens=2, temperature=0.0, logprobs=2, prompt_logprobs=i % 6)
        for i in range(len(prompts))
    ]

    clients = await answers(
        subject, sampling, num_prefill=num_prefill, together=True, prompts=prompts
    )

    for client, asked, prompt in zip(clients, sampling, prompts, strict=True):
        token_ids = prompt + client.token_ids
        expected = subject.stock_logits(token_ids).log_softmax(dim=-1).numpy()
        found = client.prompt_logprobs + client.logprobs
        assert len(found) == len(token_ids) - 1
        for place, logprobs in enumerate(found, start=1):
            row = expected[place - 1]
            num_top = (asked.prompt_logprobs or 0) if place < len(prompt) else 2
            likeliest = np.sort(row)[::-1][:num_top]
            assert logprobs.logprob == pytest.approx(row[token_ids[place]], abs=1e-4)
            assert [value for _, value in logprobs.top] == pytest.approx(likeliest, abs=1e-4)
            assert [row[each] for each, _ in logprobs.top] == pytest.approx(likeliest, abs=1e-4)
