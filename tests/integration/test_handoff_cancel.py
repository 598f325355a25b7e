"""Callers that leave, deadlines and stops while a prompt moves over a real tcp connection."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kv_transfer.geometry import BlockId
from tests.fakes.block_memory import ByteMemory
from tests.fakes.model_runner import generate
from tests.fakes.until import until
from tests.fakes.worker_rig import (
    FAKE_LAYOUT,
    ByteModelRunner,
    Client,
    Rig,
    RigConfig,
    generate_request,
    worker_rig,
)
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams
from workers.messages import Failed, FailureCode, Finished, GenerateRequest

PROMPT = tuple(range(100, 130))
NUM_TOKENS = 12
CONFIG = RigConfig(
    num_blocks=64,
    decode=DecodeConfig(local_prefill_tokens=3, transfer_deadline_s=60.0, accept_timeout_s=60.0),
)


class SlowMemory(ByteMemory):
    """A pool whose reads and writes can be made to wait, as those of a busy host would."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, FAKE_LAYOUT.bytes_per_block)
        self.reached = threading.Event()
        """Set when a transfer thread waits for a block."""
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        """Let no transfer thread get at a block until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        """Let them go on."""
        self._open.set()

    def block(self, block_id: BlockId) -> memoryview:
        if not self._open.is_set() and threading.current_thread().name.startswith("kv-"):
            self.reached.set()
            assert self._open.wait(20), "nobody let the memory go"
        return super().block(block_id)


def slow_model(num_blocks: int) -> tuple[ByteModelRunner, SlowMemory]:
    memory = SlowMemory(num_blocks)
    memory.fill(seed=3)
    return ByteModelRunner(memory), memory


def request_of(number: int = 0, *, timeout_s: float | None = None) -> GenerateRequest:
    return generate_request(
        PROMPT, SamplingParams(max_tokens=NUM_TOKENS), number=number, timeout_s=timeout_s
    )


def prefill_memory(rig: Rig) -> SlowMemory:
    memory = rig.prefill_sides[0].memory
    assert isinstance(memory, SlowMemory)
    return memory


def decode_memory(rig: Rig) -> SlowMemory:
    assert isinstance(rig.side.memory, SlowMemory)
    return rig.side.memory


@asynccontextmanager
async def held_rig() -> AsyncIterator[Rig]:
    """Workers whose memories are let go before they stop."""
    async with worker_rig(CONFIG, model=slow_model) as rig:
        try:
            yield rig
        finally:
            prefill_memory(rig).let_go()
            decode_memory(rig).let_go()


MEMORIES: dict[str, Callable[[Rig], SlowMemory]] = {
    "while prefill reads": prefill_memory,
    "while decode writes": decode_memory,
}


@pytest.mark.parametrize("memory_of", MEMORIES.values(), ids=MEMORIES.keys())
async def test_caller_that_leaves_during_the_fetch(memory_of):
    async with held_rig() as rig:
        memory_of(rig).hold()
        client = Client(rig, request_of())
        await until(memory_of(rig).reached.is_set)
        client.leave()
        await client.left()
        memory_of(rig).let_go()
        await rig.settled()


async def test_blocks_that_decode_writes_to_wait_for_the_write():
    """The transfer thread is in the middle of a block: only its end is the fence."""
    async with held_rig() as rig:
        decode_memory(rig).hold()
        client = Client(rig, request_of())
        await until(decode_memory(rig).reached.is_set)
        client.leave()
        await client.left()
        await until(lambda: rig.side.scheduler.num_live == 0)
        assert rig.side.pool.counts().quarantined == rig.side.pool.blocks_for(
            len(PROMPT) + NUM_TOKENS
        )
        decode_memory(rig).let_go()
        await rig.settled()


async def test_decode_worker_does_not_wait_for_a_prefill_worker_that_hangs():
    """What it holds is free while the other side still hangs."""
    async with held_rig() as rig:
        prefill_memory(rig).hold()
        client = Client(rig, request_of())
        await until(prefill_memory(rig).reached.is_set)
        client.leave()
        await client.left()
        await until(lambda: rig.side.is_empty)
        assert not rig.prefill_sides[0].is_empty
        prefill_memory(rig).let_go()
        await rig.settled()


@pytest.mark.parametrize("memory_of", MEMORIES.values(), ids=MEMORIES.keys())
async def test_deadline_during_the_fetch(memory_of):
    async with held_rig() as rig:
        memory_of(rig).hold()
        client = Client(rig, request_of(timeout_s=500.0))
        await until(memory_of(rig).reached.is_set)
        rig.expire()
        failed = await client.failed()
        memory_of(rig).let_go()
        await rig.settled()
        assert failed.code is FailureCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("memory_of", MEMORIES.values(), ids=MEMORIES.keys())
async def test_stop_during_the_fetch(memory_of):
    async with held_rig() as rig:
        memory_of(rig).hold()
        client = Client(rig, request_of())
        await until(memory_of(rig).reached.is_set)
        stopping = asyncio.create_task(rig.decode.stop())
        failed = await client.failed()
        memory_of(rig).let_go()
        await stopping
        await rig.settled()
        assert failed.code is FailureCode.WORKER_STOPPING


async def test_peer_that_hangs_is_replaced():
    """Silence on the connection, not the transfer's deadline, tells that it hangs."""
    async with held_rig() as rig:
        prefill_memory(rig).hold()
        client = Client(rig, request_of())
        end = await client.finished()
        prefill_memory(rig).let_go()
        await rig.settled()

        assert end.prefilled_by == "prefill-1"
        assert client.token_ids == generate(PROMPT, NUM_TOKENS)
        assert rig.decode.stats()[2].failures == {"PeerLostError": 1}


@pytest.mark.parametrize("seed", range(4))
async def test_callers_that_leave_at_any_moment_leave_nothing(seed):
    """Every number of turns of the loop is a moment: those of the whole life are tried."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(1000) for _ in range(rng.randrange(2, 40))) for _ in range(60)]

    async def call(rig: Rig, number: int) -> None:
        prompt = prompts[number]
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        client = Client(rig, generate_request(prompt, sampling, number=number))
        for _ in range(rng.randrange(1, 400) if number % 3 else 0):
            await asyncio.sleep(0)
        if number % 3:
            client.leave()
        await asyncio.wait({client.task})
        assert client.token_ids == generate(prompt, NUM_TOKENS)[: len(client.token_ids)]
        assert not any(isinstance(end, Failed) for end in client.ends), client.ends
        if number % 3 == 0:
            assert isinstance(await client.end(), Finished)

    async with worker_rig(RigConfig(queue_limit=60)) as rig:
        async with asyncio.TaskGroup() as calls:
            for number in range(len(prompts)):
                calls.create_task(call(rig, number))
        await rig.settled()
        assert rig.decode.stats()[2].placed("remote") > 0
