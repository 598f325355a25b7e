"""Blocks move while the next chunk is computed: by what happens before what, not by times."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.model_runner import generate
from tests.fakes.stream_kinds import STREAM_KINDS
from tests.fakes.worker_rig import (
    BLOCK_SIZE,
    ByteModelRunner,
    Client,
    Rig,
    RigConfig,
    generate_request,
    worker_rig,
)
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import StepPlan

PROMPT = tuple(range(100, 130))
"""Four chunks of two blocks, the last of them short."""
CHUNK = 8
PATIENCE_S = 10.0


def tokens_on_decode(rig: Rig) -> int:
    """Leading prompt tokens whose full blocks are in the decode worker's memory."""
    here = {bytes(rig.side.memory.block(BlockId(i))) for i in range(rig.side.memory.num_blocks)}
    for start in range(0, len(PROMPT), BLOCK_SIZE):
        tokens = PROMPT[start : start + BLOCK_SIZE]
        if b"".join(token.to_bytes(4, "little") for token in tokens) not in here:
            return start
    return len(PROMPT)


@pytest.mark.parametrize("kind", STREAM_KINDS, ids=lambda kind: kind.name)
async def test_a_chunks_blocks_land_before_the_next_chunk_is_granted(kind):
    """Each step of prefill ends, and so grants its chunk, only when the chunk before is there.

    A hand-off that fetched later would make the second step wait in vain.
    """
    landed_at_start: list[tuple[int, int]] = []

    def wait_for_the_chunk_before(plan: StepPlan) -> None:
        (chunk,) = plan.sequences
        until = time.monotonic() + PATIENCE_S
        while tokens_on_decode(rig) < chunk.start and time.monotonic() < until:
            threading.Event().wait(0.001)
        landed_at_start.append((chunk.start, tokens_on_decode(rig)))

    config = RigConfig(num_prefill=1, prefill_chunk_tokens=CHUNK)
    async with worker_rig(config, transport=kind.transport()) as rig:
        runner = rig.prefill_sides[0].runner
        assert isinstance(runner, ByteModelRunner)
        runner.on_execute = wait_for_the_chunk_before
        client = Client(rig, generate_request(PROMPT, SamplingParams(max_tokens=3)))
        async with asyncio.timeout(5 * PATIENCE_S):
            await client.finished()
        await rig.settled()

        assert client.token_ids == generate(PROMPT, 3)
        assert landed_at_start == [(0, 0), (8, 8), (16, 16), (24, 24)]
        stats = rig.receiver.stats()
        assert sum(stats.wait.counts) == sum(stats.fetch.counts) == 1
        assert stats.wait.total_s <= stats.fetch.total_s
