"""How hand-offs have failed elsewhere, replayed on whole workers: no wrong token, nothing held.

The numbers are those of the failure catalogue in tests/INVARIANTS.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from kv_transfer.geometry import ceil_div
from kv_transfer.handoff import ReleaseReason
from tests.fakes.model_runner import generate
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import turned, until
from tests.fakes.worker_rig import (
    BLOCK_SIZE,
    Client,
    Rig,
    RigConfig,
    Side,
    generate_request,
    worker_rig,
)
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams
from workers.messages import PrefillAccepted, PrefillEvent, PrefillRequest

PROMPT = tuple(range(100, 121))
"""21 tokens: five full blocks, and one with a single token."""
NUM_TOKENS = 6
MOVED = DecodeConfig(local_prefill_tokens=0, transfer_deadline_s=99.0, accept_timeout_s=99.0)
"""Every prompt is handed off, and a hand-off ends by what a test does."""
CONFIG = RigConfig(num_prefill=1, decode=MOVED)
CACHED = replace(CONFIG, prefix_cache=True)


def asked(
    rig: Rig, prompt: Sequence[int] = PROMPT, *, number: int = 0, salt: str = "", tokens: int = 6
) -> Client:
    sampling = SamplingParams(max_tokens=tokens)
    return Client(rig, generate_request(prompt, sampling, number=number, cache_salt=salt))


async def served(client: Client, prompt: Sequence[int] = PROMPT, tokens: int = 6) -> int:
    """The request ended with the model's own tokens; how many of its prompt were cached."""
    end = await client.finished()
    assert client.token_ids == generate(prompt, tokens)
    return end.cached_tokens


def faulty_rig(config: RigConfig, *faults: Fault, session: int = 0):
    """Workers of whose sessions one suffers these faults."""
    return worker_rig(
        config,
        transport=FaultyTransport(),
        faults_of=lambda number: faults if number == session else (),
    )


def forget(side: Side) -> None:
    """Empty a worker's cache, as other requests would."""
    everything = side.pool.reserve(side.pool.num_blocks)
    assert everything is not None
    side.pool.release(everything)


@pytest.mark.parametrize(
    ("piece", "errors"),
    [
        (0, {"LeaseLostError"}),
        (3, {"InvalidTransferError", "LeaseLostError"}),  # a race of the verdict and the renewal
        (6, {"InvalidTransferError", "LeaseLostError"}),
    ],
    ids=["before the first byte", "between two blocks", "after the last byte"],
)
async def test_reader_that_overslept_its_lease_uses_nothing_that_it_read(piece, errors):
    """F1, F2: by the time it goes on, the blocks hold somebody else's KV."""
    config = replace(CONFIG, num_prefill=2, lease_s=0.5, prefill_chunk_tokens=32, step_tokens=32)
    prompt = PROMPT[:20]  # two grants and five blocks, then the verdict
    async with faulty_rig(config, Fault(FaultKind.DELAY, piece)) as rig:
        owner = rig.prefill_sides[0]
        rig.transport.faulty.lost.add("renew")
        client = asked(rig, prompt)
        await rig.transport.faulty.wait_reached()
        await until(lambda: owner.is_empty)
        owner.memory.fill(seed=7)
        rig.transport.faulty.lost.clear()
        rig.transport.faulty.resume()
        await served(client, prompt)
        await rig.settled()
        ((error, times),) = rig.decode.stats()[2].failures.items()
        assert error in errors
        assert times == 1
        assert set(rig.prefill_workers[0].stats()[1].ended) == {ReleaseReason.EXPIRED}


async def test_link_that_decode_refuses_after_acceptance_leaves_nothing_on_prefill():
    """F13: the prefill worker is told, rather than left to its lease."""

    async def disguise(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        async with aclosing(rig.prefill_workers[0].prefill(request)) as answers:
            async for answer in answers:
                assert isinstance(answer, PrefillAccepted)
                yield replace(answer, peer=replace(answer.peer, fingerprint="0" * 32))

    async with worker_rig(replace(CONFIG, num_prefill=2, lease_s=500.0)) as rig:
        rig.prefill.script = [disguise]
        await served(asked(rig))
        await rig.settled()  # long before the lease would end
        assert rig.decode.stats()[2].failures == {"LinkRefusedError": 1}


async def test_second_attempt_waits_for_the_fence_of_the_first():
    """F5: the blocks of a transfer may have one writer, whoever it is."""
    order = []

    def second(request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        order.append("second attempt")
        return rig.prefill_workers[1].prefill(request)

    async with faulty_rig(replace(CONFIG, num_prefill=2), Fault(FaultKind.DIE, 2)) as rig:
        rig.prefill.script = [rig.prefill_workers[0].prefill, second]
        rig.transport.faulty.hold_fence()
        client = asked(rig)
        await rig.transport.faulty.wait_closing()
        assert rig.receiver is not None
        await turned(rig.receiver._thread)
        order.append("fence")
        rig.transport.faulty.pass_fence()
        await served(client)
        assert order == ["fence", "second attempt"]
        await rig.settled()


async def test_siblings_of_one_prompt_are_moved_and_freed_each_for_itself():
    """F21, F46: one of four leaves in the middle of its transfer."""
    async with faulty_rig(CACHED, Fault(FaultKind.HANG, 2), session=1) as rig:
        clients = [asked(rig, number=number) for number in range(4)]
        await rig.transport.faulty.wait_reached()
        assert len({request.transfer_id for request in rig.prefill.requests}) == 4
        hung = rig.prefill.requests[1].request_id
        for number, client in enumerate(clients):
            if hung == f"request-{number}":
                client.leave()
                await client.left()
            else:
                await served(client)
        await rig.settled()
        assert await served(asked(rig)) == len(PROMPT) - 1


async def test_two_requests_of_one_id_do_not_meet():
    """F23: a client's id names nothing; transfers have ids that decode makes."""
    prompts = (PROMPT, tuple(range(300, 330)))
    async with worker_rig(CONFIG) as rig:
        clients = [asked(rig, prompt, number=5) for prompt in prompts]
        for client, prompt in zip(clients, prompts, strict=True):
            await served(client, prompt)
        assert len({request.request_id for request in rig.prefill.requests}) == 1
        assert len({request.transfer_id for request in rig.prefill.requests}) == 2
        await rig.settled()


@pytest.mark.parametrize("length", [20, 21], ids=["whole blocks", "a token more"])
@pytest.mark.parametrize("forgets", ["nobody", "decode", "prefill"])
async def test_hits_of_every_length_give_the_tokens_of_none(length, forgets):
    """F25, F27, F29: a prompt that begins like an earlier one, by any number of tokens."""
    prompt = PROMPT[:length]
    async with worker_rig(CACHED) as rig:
        for same in range(length + 1):
            earlier = (*prompt[:same], *(900 for _ in range(5)))
            await served(asked(rig, earlier, salt=str(same)), earlier)
            await rig.settled()
            if forgets != "nobody":
                forget(rig.side if forgets == "decode" else rig.prefill_sides[0])
            cached = await served(asked(rig, prompt, salt=str(same)), prompt)
            await rig.settled()
            found = min(same, length - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert cached == (0 if forgets == "prefill" else found)
        assert rig.decode.stats()[2].failures == {}


async def test_granted_hit_is_not_evicted_while_somebody_may_read_it():
    """F41: the cache would have to give up the blocks, were it not for the lease."""
    async with faulty_rig(
        replace(CACHED, prefill_blocks=17), Fault(FaultKind.DELAY, 0), session=1
    ) as rig:
        await served(asked(rig))
        await rig.settled()
        forget(rig.side)
        owner = rig.prefill_sides[0]
        client = asked(rig)
        await rig.transport.faulty.wait_reached()
        room = owner.pool.num_blocks - ceil_div(len(PROMPT), BLOCK_SIZE)
        greedy = PrefillRequest(
            request_id="greedy",
            transfer_id="greedy",
            epoch=0,
            decode=rig.side.info,
            prompt_token_ids=tuple(range(500, 500 + room * BLOCK_SIZE)),
            sampling=SamplingParams(max_tokens=1),
        )
        async with aclosing(rig.prefill_workers[0].prefill(greedy)) as answers:
            await anext(answers)
            await until(lambda: owner.scheduler.totals.prompt_tokens >= 22 + room * BLOCK_SIZE)
            rig.transport.faulty.resume()
            assert await served(client) == len(PROMPT) - 1
        await rig.settled()
        assert rig.decode.stats()[2].failures == {}


async def test_two_transfers_that_do_not_fit_together_come_one_after_the_other():
    """F42: whoever waits for blocks holds none that another needs."""
    needed = ceil_div(len(PROMPT) + 15, BLOCK_SIZE)
    config = replace(CONFIG, num_blocks=2 * needed - 1, prefill_blocks=32)
    async with faulty_rig(config, Fault(FaultKind.DELAY, 0)) as rig:
        first = asked(rig, tokens=15)
        await rig.transport.faulty.wait_reached()
        second = asked(rig, number=1, tokens=15)
        await until(lambda: rig.side.scheduler.num_waiting == 1)
        assert rig.side.pool.counts().free == needed - 1
        assert len(rig.prefill.requests) == 1
        rig.transport.faulty.resume()
        await served(first, tokens=15)
        await served(second, tokens=15)
        await rig.settled()
