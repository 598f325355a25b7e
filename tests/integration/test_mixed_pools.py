"""Pools of any numbers and sizes: every decode worker takes prompts from every prefill worker."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.fakes.model_runner import generate
from tests.fakes.stream_kinds import NIXL, STREAM_KINDS, kind_parameters
from tests.fakes.until import until
from tests.fakes.worker_rig import Client, RigConfig, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams

NUM_REQUESTS = 32
POOLS = [(2, 2), (2, 1), (1, 2), (3, 2)]


@pytest.fixture(params=kind_parameters((*STREAM_KINDS, NIXL)))
def kind(request):
    return request.param


def uneven(num_prefill: int, num_decode: int) -> RigConfig:
    """Prefill pools of just over a window, decode pools of several."""
    return RigConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=48,
        prefill_blocks=17,
        queue_limit=64,
    )


def make_prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(1, 1000) for _ in range(rng.randint(5, 50))] for _ in range(NUM_REQUESTS)
    ]


async def served(client: Client, prompt: list[int]) -> str:
    """Who prefilled; the tokens must be the only right ones."""
    finished = await client.finished()
    assert client.token_ids == generate(prompt, 6)
    return finished.prefilled_by


@pytest.mark.parametrize(("num_prefill", "num_decode"), POOLS)
async def test_uneven_pools_serve_every_prompt_right(kind, num_prefill, num_decode):
    config = uneven(num_prefill, num_decode)
    async with worker_rig(config, transport=kind.transport(), another=kind.transport) as rig:
        prompts = make_prompts(seed=num_prefill * 10 + num_decode)
        clients = [
            Client(
                rig,
                generate_request(prompt, SamplingParams(max_tokens=6), number=number),
                decode=number % num_decode,
            )
            for number, prompt in enumerate(prompts)
        ]
        places = Counter([await served(*pair) for pair in zip(clients, prompts, strict=True)])
        await rig.settled()
        assert set(places) == {f"prefill-{i}" for i in range(num_prefill)}
        for end in rig.decode_ends:
            links = end.receiver.stats().links
            assert set(links) <= set(places)
            assert {choice.transport for choice in links.values()} == {kind.name}
            assert end.worker.stats()[2].placed("fallback") == 0


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_a_prefill_worker_that_goes_costs_no_wrong_token(kind, num_decode):
    """It goes with prompts under way: each is computed by the other one, or where it decodes."""
    config = uneven(2, num_decode)
    async with worker_rig(config, transport=kind.transport(), another=kind.transport) as rig:
        going = rig.prefill_sides[0]
        going.runner.hold()
        prompts = make_prompts(seed=num_decode)
        clients = [
            Client(
                rig,
                generate_request(prompt, SamplingParams(max_tokens=6), number=number),
                decode=number % num_decode,
            )
            for number, prompt in enumerate(prompts)
        ]
        await until(lambda: rig.prefill_workers[0].stats()[1].active_leases > 0)
        going.runner.let_go()
        await rig.prefill_workers[0].stop()
        places = Counter(
            await asyncio.gather(*(served(*pair) for pair in zip(clients, prompts, strict=True)))
        )
        await rig.settled()
        assert places["prefill-1"] > 0
        assert any(end.worker.stats()[2].failures for end in rig.decode_ends)
