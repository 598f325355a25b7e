"""Log-probabilities of a prompt do not depend on who computes it, nor on what is cached of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.paged_model import paged
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.fakes.worker_rig import Client, RigConfig, generate_request, worker_rig
from workers.decode import DecodeConfig
from workers.engine.sampling_params import SamplingParams

FAMILIES = {"llama": False, "gemma2": True}
"""With whether some of its layers have a sliding window."""
LENGTHS = (9, 150)
BLOCK_SIZE = 4
CHUNK = 17
NUM_TOP = 3
TOLERANCE = 1e-4
SCORED = SamplingParams(max_tokens=2, temperature=0.0, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
UNSCORED = SamplingParams(max_tokens=2, temperature=0.0, logprobs=NUM_TOP)


def values(logprobs: Sequence[TokenLogprobs]) -> np.ndarray:
    """`[tokens, 1 + NUM_TOP]`: of each token and of the likeliest in its place."""
    return np.array([[each.logprob, *(value for _, value in each.top)] for each in logprobs])


async def served(config: RigConfig, model, prompt: tuple[int, ...]) -> list[np.ndarray]:
    """Of prompt and output: cold, and warm; of the output alone, of a request that was a hit."""
    async with worker_rig(config, model=model) as rig:
        clients, cached = [], []
        for number, sampling in enumerate((SCORED, UNSCORED, SCORED)):
            client = Client(rig, generate_request(prompt, sampling, number=number))
            cached.append((await client.finished()).cached_tokens)
            clients.append(client)
            await rig.settled()
    # A prompt that is scored takes no hits: the one that does shows that there was one.
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    cold, found, warm = clients
    assert found.token_ids == cold.token_ids == warm.token_ids
    return [
        values(cold.prompt_logprobs + cold.logprobs),
        values(warm.prompt_logprobs + warm.logprobs),
        values(found.logprobs),
    ]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_prompt_is_scored_alike_cold_warm_split_and_colocated(family, length):
    stock = make_model(family, SERVED[family])
    layout = layout_of(stock, block_size=BLOCK_SIZE)
    assert layout.has_sliding_window == FAMILIES[family]
    rng = random.Random(length)
    prompt = tuple(rng.randrange(1, 256) for _ in range(length))
    answers = []
    for num_prefill in (0, 1):
        config = RigConfig(
            layout=layout,
            num_blocks=400,
            max_model_len=MAX_MODEL_LEN,
            step_tokens=48,
            prefill_chunk_tokens=CHUNK,
            num_prefill=num_prefill,
            prefix_cache=True,
            decode=DecodeConfig(local_prefill_tokens=8, transfer_deadline_s=20.0),
        )
        answers.append(await served(config, paged(stock, layout), prompt))
    (cold, warm, found), (split_cold, split_warm, split_found) = answers
    assert cold.shape == (length - 1 + 2, 1 + NUM_TOP)
    for other in (warm, split_cold, split_warm):
        np.testing.assert_allclose(other, cold, rtol=0, atol=TOLERANCE)
    for other in (found, split_found):
        np.testing.assert_allclose(other, cold[length - 1 :], rtol=0, atol=TOLERANCE)
