"""Two hundred requests, a faulty link, callers that leave: no wrong token, and nothing left over.

The model is a tiny random one in fp32. What each request must give was generated before, alone and
without a hand-off, and by transformers where it is greedy.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.fakes.paged_model import paged
from tests.fakes.tiny_models import MAX_MODEL_LEN, SERVED, layout_of, make_model
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from tests.parity.ledger import TIE
from tests.parity.references import make_reference
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams
from workers.messages import Finished

SEED = 20
NUM_REQUESTS = 200
AT_ONCE = 24
BLOCK_SIZE = 4
FAULTS = (
    FaultKind.DIE,
    FaultKind.HANG,
    FaultKind.DROP,
    FaultKind.DUPLICATE,
    FaultKind.REORDER,
    FaultKind.CORRUPT,
    FaultKind.TRUNCATE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One request, and its only right answer."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    token_ids: tuple[int, ...]


def faults_of(number: int) -> Sequence[Fault]:
    """Two sessions in five suffer something, always the same for the same number."""
    rng = random.Random(SEED * 1000 + number)
    if rng.random() > 0.4:
        return ()
    return (Fault(rng.choice(FAULTS), rng.randrange(8)),)


async def make_golden(rig: Rig, rng: random.Random) -> list[Golden]:
    """Prompts of 1 to 90 tokens with their tokens, alone on a colocated worker."""
    golden = []
    for number in range(32):
        prompt = tuple(rng.randrange(1, 256) for _ in range(rng.choice((1, 3, 9, 16, 40, 64, 90))))
        num_tokens = rng.randrange(1, 25)
        temperature = 0.0 if number % 2 else 0.9
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, top_p=0.95, seed=number
        )
        client = Client(rig, generate_request(prompt, sampling))
        await client.finished()
        golden.append(Golden(prompt=prompt, sampling=sampling, token_ids=tuple(client.token_ids)))
    return golden


def assert_as_generate(model: torch.nn.Module, golden: Sequence[Golden]) -> None:
    """The greedy half, by the oracle; none of it rests on a tie."""
    for one in golden:
        if one.sampling.temperature == 0.0:
            reference = make_reference(model, one.prompt, one.sampling.max_tokens)
            assert min(reference.gaps) > TIE, "a tie: choose another seed"
            assert one.token_ids == reference.tokens


class Caller:
    """Sends requests of the golden ones, and leaves a quarter of them at some moment."""

    def __init__(self, rig: Rig, golden: Sequence[Golden], rng: random.Random) -> None:
        self._rig = rig
        self._golden = golden
        self._rng = rng
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def call(self, number: int) -> None:
        """One request from its beginning to whatever end it has."""
        one = self._rng.choice(self._golden)
        client = Client(
            self._rig,
            generate_request(one.prompt, one.sampling, number=number),
            patience_s=60.0,
        )
        if self._rng.random() < 0.25:
            loop = asyncio.get_running_loop()
            loop.call_later(self._rng.random() * 0.3, client.leave)
        await asyncio.wait({client.task}, timeout=60.0)
        self._judge(number, one, client)

    def _judge(self, number: int, one: Golden, client: Client) -> None:
        if client.task.cancelled():
            self.outcomes["left"] += 1
        elif len(client.ends) == 1 and isinstance(client.ends[0], Finished):
            self.outcomes[client.ends[0].prefilled_by] += 1
        else:
            self.wrong.append(f"request {number} ended with {client.ends}")
        got = tuple(client.token_ids)
        expected = one.token_ids if client.ends else one.token_ids[: len(got)]
        if got != expected:
            self.wrong.append(f"request {number} gave {got}, not {expected}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_soak_gives_no_wrong_token_and_leaves_nothing(prefix_cache):
    rng = random.Random(SEED)
    model = make_model("llama", SERVED["llama"])
    oracle = make_model("llama", SERVED["llama"])
    layout = layout_of(model, block_size=BLOCK_SIZE)
    config = RigConfig(
        layout=layout,
        num_blocks=160,
        max_model_len=MAX_MODEL_LEN,
        step_tokens=48,
        prefill_chunk_tokens=32,
        queue_limit=NUM_REQUESTS,
        lease_s=1.0,
        decode=DecodeConfig(local_prefill_tokens=8, transfer_deadline_s=0.5),
    )
    async with worker_rig(replace(config, num_prefill=0), model=paged(model, layout)) as rig:
        golden = await make_golden(rig, rng)
    assert_as_generate(oracle, golden)

    config = replace(config, prefix_cache=prefix_cache)
    async with worker_rig(
        config, model=paged(model, layout), transport=FaultyTransport(), faults_of=faults_of
    ) as rig:
        caller = Caller(rig, golden, rng)
        places = asyncio.Semaphore(AT_ONCE)

        async def call(number: int) -> None:
            async with places:
                if number == NUM_REQUESTS // 2:
                    await rig.prefill_workers[1].stop()
                await caller.call(number)

        async with asyncio.TaskGroup() as calls:
            for number in range(NUM_REQUESTS):
                calls.create_task(call(number))
        await rig.settled()
        stats = rig.decode.stats()[2]
        engine = rig.decode.stats()[0]
        print(f"hit={engine.prefix_hit_tokens} evicted={engine.evicted_blocks}", end=" ")
        print(f"seed={SEED} outcomes={dict(caller.outcomes)} failures={stats.failures}")

    assert caller.wrong == []
    assert sum(caller.outcomes.values()) == NUM_REQUESTS
    assert {"left", "prefill-0", "prefill-1", "decode-0"} <= caller.outcomes.keys()
    if prefix_cache:  # most of what would have been moved was found: fewer links, fewer faults
        assert engine.prefix_hit_tokens > 0
        assert engine.evicted_blocks > 0
        assert set(stats.failures)
    else:
        assert {"CorruptTransferError", "TransferDeadlineError"} <= set(stats.failures)
