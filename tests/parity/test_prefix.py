"""Greedy tokens are those of `generate`, cold, warm and split with hits on either side.

Tiny random models in fp32, some with sliding windows: their blocks behind the window are kept, so
that a hit is as good there.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.fakes.paged_model import paged
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from tests.parity.references import Reference, make_reference
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
FAMILIES = {
    **{family: SERVED[family] for family in ("llama", "qwen3", "gpt2")},
    **{family: SERVED[family] for family in ("mistral", "gemma2", "gemma3_text", "gpt_oss")},
    "qwen2": {
        **SERVED["qwen2"],
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
}
"""Some see everything everywhere, some in some layers, some in none."""
WINDOWED = frozenset(FAMILIES) - {"llama", "qwen3", "gpt2"}
BLOCK_SIZE = 4
TIE = 1e-4
"""Logits that are closer may change places by rounding alone."""


def references_of(model, rng: random.Random) -> list[Reference]:
    """Prompts that begin alike, and one that is the next turn of another."""
    beginning = [rng.randrange(1, 256) for _ in range(50)]
    prompts = [
        [*beginning, *(rng.randrange(1, 256) for _ in range(length))] for length in (0, 9, 27)
    ]
    references = [make_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    turn = [*references[1].prompt, *references[1].tokens, 5, 6, 7]
    return [*references, make_reference(model, turn, NUM_TOKENS)]


async def ask_all(rig: Rig, references: list[Reference]) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of each, one after the other, and how many prompt tokens were cached."""
    generated, cached = [], 0
    for number, reference in enumerate(references):
        client = Client(rig, generate_request(reference.prompt, GREEDY, number=number))
        cached += (await client.finished()).cached_tokens
        generated.append(tuple(client.token_ids))
    await rig.settled()
    return generated, cached


@pytest.mark.parametrize("family", FAMILIES)
async def test_cold_warm_and_split_give_the_tokens_of_generate(family):
    references = references_of(make_model(family, FAMILIES[family]), random.Random(7))
    expected = [reference.tokens for reference in references]
    assert min(min(reference.gaps) for reference in references) > TIE, "a tie: choose another seed"
    model = make_model(family, FAMILIES[family])
    layout = layout_of(model, block_size=BLOCK_SIZE)
    assert layout.has_sliding_window == (family in WINDOWED)
    split = RigConfig(
        layout=layout,
        num_blocks=200,
        max_model_len=MAX_MODEL_LEN,
        step_tokens=48,
        prefill_chunk_tokens=17,
        num_prefill=1,
        decode=DecodeConfig(local_prefill_tokens=8, transfer_deadline_s=20.0),
    )
    colocated = replace(split, num_prefill=0)
    async with worker_rig(colocated, model=paged(model, layout)) as rig:
        cold, cached = await ask_all(rig, references)
        assert cached == 0
    assert cold == expected
    for config in (colocated, split):
        async with worker_rig(
            replace(config, prefix_cache=True), model=paged(model, layout)
        ) as rig:
            first, cached = await ask_all(rig, references)
            assert cached >= 2 * 48
            again, cached = await ask_all(rig, references)
            assert cached > sum(len(reference.prompt) - 9 for reference in references)
            assert first == again == expected
