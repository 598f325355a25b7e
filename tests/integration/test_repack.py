"""Prefill and decode with blocks of unequal sizes: the same tokens, no other block touched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.paged_model import paged
from tests.fakes.stream_kinds import NIXL, STREAM_KINDS, TCP, kind_parameters
from tests.fakes.tiny_models import SERVED, layout_of, make_model
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from tests.parity.references import make_reference
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams

WINDOW = 192
OUTPUT_TOKENS = 8
OWN_BLOCK_SIZE = 16
CONFIG = RigConfig(
    num_blocks=2 * WINDOW // OWN_BLOCK_SIZE,
    prefill_blocks=2 * WINDOW // 8,
    max_model_len=WINDOW,
    num_prefill=1,
    step_tokens=64,
    prefill_chunk_tokens=40,
    prefix_cache=True,
    decode=DecodeConfig(
        local_prefill_tokens=3, transfer_deadline_s=60.0, accept_timeout_s=60.0, attempts=1
    ),
)


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """The same beginning for the same number, of any length."""
    rng = random.Random(number)
    return tuple(rng.randrange(1, 256) for _ in range(length))


@pytest.fixture(scope="module")
def oracle():
    return make_model("llama", SERVED["llama"])


@pytest.fixture(scope="module")
def model():
    return make_model("llama", SERVED["llama"])


async def ask(rig: Rig, oracle: object, prompt: Sequence[int]) -> str:
    """Who prefilled; the tokens are those of transformers."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    client = Client(rig, generate_request(prompt, sampling))
    finished = await client.finished()
    assert tuple(client.token_ids) == make_reference(oracle, prompt, OUTPUT_TOKENS).tokens
    return finished.prefilled_by


def rig_with(model, kind, prefill_layout):
    layout = layout_of(model, block_size=OWN_BLOCK_SIZE)
    return worker_rig(
        replace(CONFIG, layout=layout, prefill_layout=prefill_layout),
        model=paged(model, layout, shared=True),
        prefill_model=paged(model, prefill_layout, shared=True),
        transport=kind.transport(),
    )


@pytest.mark.parametrize("kind", kind_parameters((*STREAM_KINDS, NIXL)))
@pytest.mark.parametrize("block_size", [8, 32, 12])
async def test_a_prompt_in_blocks_of_another_size_gives_the_same_tokens(
    model, oracle, kind, block_size
):
    async with rig_with(model, kind, layout_of(model, block_size=block_size)) as rig:
        for number, length in enumerate((5, 32, 33, 100, 160)):
            prompt = prompt_of(number, length)
            assert await ask(rig, oracle, prompt) == "prefill-0"
        await rig.settled()
        stats = rig.receiver.stats()
        assert stats.by_outcome == {"landed": 5}
        blocks = sum(-(-length // block_size) for length in (5, 32, 33, 100, 160))
        assert stats.blocks_published == blocks


@pytest.mark.parametrize("block_size", [8, 32])
async def test_what_decode_has_of_a_prompt_is_not_written_to(model, oracle, block_size):
    """A block of 32 that decode has half of is sent whole, and only its second half is used."""
    kind = TCP
    async with rig_with(model, kind, layout_of(model, block_size=block_size)) as rig:
        await ask(rig, oracle, prompt_of(1, 50))  # leaves 48 tokens in three blocks of decode's
        cache = rig.side.pool.cache
        held = {block: bytes(rig.side.memory.block(block)) for block in cached_blocks(cache)}
        assert len(held) == 3

        assert await ask(rig, oracle, prompt_of(1, 130)) == "prefill-0"

        assert rig.prefill.requests[1].skip_tokens == 48
        for block, content in held.items():
            assert bytes(rig.side.memory.block(block)) == content


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("own_size", "block_size"), [(16, 4), (16, 12), (4, 16), (6, 4)])
async def test_what_a_window_leaves_in_blocks_of_another_size_gives_the_same_tokens(
    family, own_size, block_size
):
    """A window begins in the middle of blocks: of decode's, maybe before prefill's begins.

    Pools are full of NaN. The second prompt of a pair would see more of the first one's blocks than
    what follows that has seen: it may find only what came whole, which larger blocks bring.
    """
    reference, model = (make_model(family, SERVED[family]) for _ in range(2))
    layout, prefill_layout = (layout_of(model, block_size=size) for size in (own_size, block_size))
    assert layout.has_sliding_window
    config = replace(
        CONFIG,
        layout=layout,
        prefill_layout=prefill_layout,
        num_blocks=400,
        prefill_blocks=400,
    )
    async with worker_rig(
        config,
        model=paged(model, layout),
        prefill_model=paged(model, prefill_layout),
        transport=TCP.transport(),
    ) as rig:
        for length in range(33, 49):
            prompt = prompt_of(length, length)
            assert await ask(rig, reference, prompt) == "prefill-0"
            await ask(rig, reference, (*prompt[:32], *prompt_of(1, 30)))
        await rig.settled()
        assert set(rig.receiver.stats().by_outcome) == {"landed"}
        assert (rig.decode.stats()[0].prefix_hit_tokens > 0) == (block_size > own_size)


def cached_blocks(cache) -> list[BlockId]:
    return sorted(cache._entries)


async def test_a_rank_of_a_split_model_is_refused_and_the_prompt_computed_here(
    model, oracle, caplog
):
    """A rank's blocks have a part of the heads: decode asks one owner, which has not the whole."""
    whole = layout_of(model, block_size=OWN_BLOCK_SIZE)
    rank = whole.for_rank(1, 2)
    async with rig_with(model, TCP, whole) as rig:
        info = rig.prefill_sides[0].info
        changes = {
            name: getattr(
                type(info).of(rank, worker_id="", incarnation="", max_model_len=1, pool_tokens=1),
                name,
            )
            for name in ("fingerprint", "num_kv_heads", "bytes_per_block", "tp_size", "tp_rank")
        }
        worker = rig.prefill_workers[0]
        worker._me = replace(worker.me, **changes)

        assert await ask(rig, oracle, prompt_of(1, 50)) == "decode-0"
    assert "KV heads do not add up: 1 to 1 on prefill-0, 0 to 1 on decode-0" in caplog.text
