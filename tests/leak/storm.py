"""Tenants with canaries of their own, and everything that could carry one to the wrong reader.

All prompts begin alike, then comes their tenant's canary, then a question of their own. Callers
leave at random moments, workers restart as other incarnations, and pools of two windows with a
prefix cache are always full. Whatever an answer is made of, it shows: greedy fp32 tokens are
compared with those that the prompt gets alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request
from tests.leak.scenes import BLOCK_SIZE, Prompt
from tests.parity.ledger import TIE
from tests.parity.references import make_reference
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams
from workers.messages import Failed, FailureCode

WINDOW = 96
OUTPUT_TOKENS = 10
NUM_TENANTS = 3
PROMPTS_PER_TENANT = 6
AT_ONCE = 12
SHARED_TOKENS = 3 * BLOCK_SIZE
CANARY_TOKENS = 5
"""Its repetitions begin at every offset in a block."""

CONFIG = RigConfig(
    num_blocks=2 * WINDOW // BLOCK_SIZE,
    max_model_len=WINDOW,
    num_prefill=2,
    num_decode=2,
    step_tokens=48,
    prefill_chunk_tokens=16,
    queue_limit=4 * AT_ONCE,
    prefix_cache=True,
    decode=DecodeConfig(
        local_prefill_tokens=BLOCK_SIZE, transfer_deadline_s=60.0, accept_timeout_s=60.0
    ),
)
"""Without its layout, which is the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One tenant's prompt, and the only right answer to it."""

    tenant: int
    prompt: Prompt
    token_ids: tuple[int, ...]


def make_asks(model: torch.nn.Module, seed: int) -> list[Ask]:
    """Every tenant's prompts; none of the answers rests on a tie, and no two of them are equal."""
    rng = random.Random(seed)
    shared = _tokens(rng, SHARED_TOKENS)
    asks: list[Ask] = []
    for tenant in range(NUM_TENANTS):
        canary = _tokens(rng, CANARY_TOKENS)
        num_asked = 0
        while num_asked < PROMPTS_PER_TENANT:
            tail = _tokens(rng, rng.randrange(1, 20))
            prompt = shared + canary * rng.randrange(2, 9) + tail
            reference = make_reference(model, prompt, OUTPUT_TOKENS)
            if min(reference.gaps) > TIE:
                asks.append(Ask(tenant=tenant, prompt=prompt, token_ids=reference.tokens))
                num_asked += 1
    assert len({ask.token_ids for ask in asks}) == len(asks), "another seed: answers are equal"
    return asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a storm has shown."""

    outcomes: Counter[str]
    wrong: list[str]
    """Answers that were not the right ones."""
    found_tokens: int
    """Prompt tokens that decode workers found in their caches, restarted ones aside."""
    evicted_blocks: int


class Storm:
    """Asks and leaves, and restarts workers, until enough was asked."""

    def __init__(self, rig: Rig, asks: Sequence[Ask], seed: int) -> None:
        self._rig = rig
        self._asks = asks
        self._rng = random.Random(seed)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._outcomes: Counter[str] = Counter()
        self._wrong: list[str] = []

    async def run(self, num_requests: int, *, restart_every: int) -> Report:
        """Send so many requests; after every `restart_every` of them a worker restarts."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_requests):
                await self._places.acquire()
                if number % restart_every == restart_every - 1:
                    await self._restart(number // restart_every)
                tasks.create_task(self._ask(number))
        await self._rig.settled()
        engines = [end.worker.stats()[0] for end in self._rig.decode_ends]
        return Report(
            outcomes=self._outcomes,
            wrong=self._wrong,
            found_tokens=sum(engine.prefix_hit_tokens for engine in engines),
            evicted_blocks=sum(engine.evicted_blocks for engine in engines),
        )

    async def _restart(self, turn: int) -> None:
        """Prefill and decode workers in turns."""
        of_both, number = turn % 2, turn // 2 % 2
        restart = self._rig.restart_decode if of_both else self._rig.restart_prefill
        await restart(number)
        self._outcomes["restarts"] += 1

    async def _ask(self, number: int) -> None:
        try:
            ask = self._rng.choice(self._asks)
            request = generate_request(
                ask.prompt,
                SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0),
                number=number,
                cache_salt=f"tenant-{ask.tenant}",
            )
            client = Client(self._rig, request, decode=self._rng.randrange(2), patience_s=60.0)
            if self._rng.random() < 0.35:
                await self._leave_somewhere(client)
            await asyncio.wait({client.task})
            self._judge(number, ask, client)
        finally:
            self._places.release()

    async def _leave_somewhere(self, client: Client) -> None:
        """After some turns of the loop, of which a request takes some hundreds."""
        for _ in range(self._rng.randrange(600)):
            await asyncio.sleep(0)
        client.leave()

    def _judge(self, number: int, ask: Ask, client: Client) -> None:
        got = tuple(client.token_ids)
        outcome = self._outcome(client)
        self._outcomes[outcome] += 1
        expected = ask.token_ids if outcome == "finished" else ask.token_ids[: len(got)]
        if got != expected:
            self._wrong.append(f"request {number} of tenant {ask.tenant}: {got}, not {expected}")

    def _outcome(self, client: Client) -> str:
        if client.task.cancelled():
            return "left"
        (end,) = client.ends
        if not isinstance(end, Failed):
            return "finished"
        # Where its decode worker restarted; Front would go on with another one.
        assert end.code is FailureCode.WORKER_STOPPING, end
        return "stopped"


def _tokens(rng: random.Random, number: int) -> Prompt:
    return tuple(rng.randrange(1, 256) for _ in range(number))
