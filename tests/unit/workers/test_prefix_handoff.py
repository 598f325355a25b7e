"""Prefix hits across a hand-off: what is moved, what is computed, by whom, and what is told."""

from __future__ import annotations

from dataclasses import replace

from tests.fakes.model_runner import generate
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.until import until
from tests.fakes.worker_rig import BLOCK_SIZE, Client, Rig, RigConfig, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.messages import Finished, PrefillRequest, TokenFrame

PROMPT = tuple(range(100, 121))
"""21 tokens: five full blocks and one token; 20 of them are a hit."""
HIT = 20
CONFIG = RigConfig(prefix_cache=True, num_prefill=1)
NUM_TOKENS = 6


async def ask(
    rig: Rig,
    prompt: tuple[int, ...] = PROMPT,
    *,
    salt: str = "",
    looks_up: bool = True,
    max_tokens: int = NUM_TOKENS,
) -> Finished:
    """One request, served with the model's own tokens."""
    request = generate_request(
        prompt,
        SamplingParams(max_tokens=max_tokens, prompt_logprobs=None if looks_up else 0),
        cache_salt=salt,
    )
    client = Client(rig, request)
    end = await client.finished()
    assert client.token_ids == generate(prompt, max_tokens)
    frames = [event for event in client.events if isinstance(event, TokenFrame)]
    assert {frame.cached_tokens for frame in frames} == {end.cached_tokens}
    await rig.settled()
    return end


def computed(rig: Rig) -> tuple[int, int]:
    """Prompt tokens computed so far, on prefill and on decode."""
    return (
        sum(worker.stats()[0].prompt_tokens for worker in rig.prefill_workers),
        rig.decode.stats()[0].prompt_tokens,
    )


def forget(rig: Rig, *, decode: bool) -> None:
    """Empty one side's cache: as after other requests, or after a restart."""
    for side in (rig.side,) if decode else rig.prefill_sides:
        everything = side.pool.reserve(side.pool.num_blocks)
        assert everything is not None
        side.pool.release(everything)


async def test_cold_prompt_is_computed_by_prefill_and_nothing_is_told_as_cached():
    async with worker_rig(CONFIG) as rig:
        assert (await ask(rig)).cached_tokens == 0
        assert computed(rig) == (21, 0)


async def test_hit_on_decode_that_leaves_little_is_finished_there():
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        end = await ask(rig)
        assert (end.prefilled_by, end.cached_tokens) == ("decode-0", HIT)
        assert computed(rig) == (21, 1)
        assert len(rig.prefill.requests) == 1
        stats = rig.decode.stats()[2]
        assert (stats.placed("remote"), stats.placed("local")) == (1, 1)


async def test_hit_on_decode_shortens_the_fetch_and_hit_on_prefill_the_computation():
    longer = (*PROMPT, *range(200, 210))
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        moved = rig.receiver.stats().blocks_published
        end = await ask(rig, longer)
        assert (end.prefilled_by, end.cached_tokens) == ("prefill-0", HIT)
        assert rig.prefill.requests[1].skip_tokens == HIT
        assert computed(rig) == (21 + len(longer) - HIT, 0)
        assert rig.receiver.stats().blocks_published - moved == 8 - HIT // BLOCK_SIZE


async def test_hit_on_decode_alone_is_not_told_as_cached():
    """Prefill computed those tokens again: somebody did."""
    longer = (*PROMPT, *range(200, 210))
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        forget(rig, decode=False)
        end = await ask(rig, longer)
        assert end.cached_tokens == 0
        assert rig.prefill.requests[1].skip_tokens == HIT
        assert computed(rig) == (21 + len(longer), 0)


async def test_hit_on_prefill_alone_is_granted_as_what_is_computed():
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        forget(rig, decode=True)
        end = await ask(rig)
        assert (end.prefilled_by, end.cached_tokens) == ("prefill-0", HIT)
        assert rig.prefill.requests[1].skip_tokens == 0
        assert computed(rig) == (22, 0)
        assert rig.receiver.stats().blocks_published == 6 + 6


async def test_hit_on_prefill_is_granted_before_anything_is_computed():
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        forget(rig, decode=True)
        rig.prefill_sides[0].runner.hold()
        landed = rig.receiver.stats().digests_checked
        client = Client(rig, generate_request(PROMPT, SamplingParams(max_tokens=2)))
        await until(rig.prefill_sides[0].runner.begun.is_set)
        await until(lambda: rig.side.runner.read(client_blocks(rig), HIT) == list(PROMPT[:HIT]))
        rig.prefill_sides[0].runner.let_go()
        await client.finished()
        await rig.settled()
        assert rig.receiver.stats().digests_checked == landed + 6


def client_blocks(rig: Rig) -> tuple[int, ...]:
    """The block table of the only live sequence on decode."""
    (sequence,) = rig.side.scheduler._roster.live.values()
    return sequence.block_ids


async def test_next_turn_finds_the_answer_to_the_first():
    async with worker_rig(CONFIG) as rig:
        await ask(rig, max_tokens=8)
        turn = (*PROMPT, *generate(PROMPT, 8), 7, 7)
        end = await ask(rig, turn)
        assert (end.prefilled_by, end.cached_tokens) == ("decode-0", 28)
        assert computed(rig) == (21, 3)


async def test_another_salt_finds_nothing_on_either_side():
    """INV-SALT."""
    async with worker_rig(CONFIG) as rig:
        await ask(rig, salt="a")
        end = await ask(rig, salt="b")
        assert (end.prefilled_by, end.cached_tokens) == ("prefill-0", 0)
        assert rig.prefill.requests[1].skip_tokens == 0
        assert computed(rig) == (42, 0)
        assert (await ask(rig, salt="a")).cached_tokens == HIT


async def test_request_that_must_not_use_hits_has_every_token_computed():
    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        end = await ask(rig, looks_up=False)
        assert (end.prefilled_by, end.cached_tokens) == ("prefill-0", 0)
        assert computed(rig) == (42, 0)


async def test_colocated_worker_tells_its_hit():
    async with worker_rig(replace(CONFIG, num_prefill=0)) as rig:
        assert (await ask(rig)).cached_tokens == 0
        assert (await ask(rig)).cached_tokens == HIT
        assert computed(rig) == (0, 22)


async def test_without_a_cache_nothing_is_found():
    async with worker_rig(replace(CONFIG, prefix_cache=False)) as rig:
        await ask(rig)
        assert (await ask(rig)).cached_tokens == 0
        assert rig.decode.stats()[0].cached_blocks == 0
        assert rig.decode.stats()[0].prefix_queried_tokens == 0


async def test_requests_that_come_together_are_computed_once_where_one_waits_for_the_other():
    async with worker_rig(replace(CONFIG, num_prefill=0, prefill_chunk_tokens=16)) as rig:
        requests = [
            generate_request(PROMPT, SamplingParams(max_tokens=NUM_TOKENS), number=number)
            for number in range(4)
        ]
        clients = [Client(rig, request) for request in requests]
        ends = [await client.finished() for client in clients]
        assert all(client.token_ids == generate(PROMPT, NUM_TOKENS) for client in clients)
        assert sum(end.cached_tokens for end in ends) + computed(rig)[1] == 4 * len(PROMPT)
        assert computed(rig)[1] < 2 * len(PROMPT)
        await rig.settled()


async def test_blocks_of_a_failed_transfer_are_found_by_nobody():
    """INV-COVER: what landed without VALID is computed, or moved, again."""
    longer = (*PROMPT, *range(200, 210))
    async with worker_rig(
        replace(CONFIG, num_prefill=2),
        transport=FaultyTransport(),
        faults_of=lambda number: (Fault(FaultKind.CORRUPT, 1),) if number == 1 else (),
    ) as rig:
        await ask(rig)
        end = await ask(rig, longer)
        assert rig.decode.stats()[2].failures == {"CorruptTransferError": 1}
        assert end.prefilled_by == "prefill-0"
        skips = [request.skip_tokens for request in rig.prefill.requests]
        assert skips == [0, HIT, HIT]
        assert rig.side.pool.counts().quarantined == 0


async def test_fallback_computes_only_what_is_behind_the_hit():
    longer = (*PROMPT, *range(200, 210))

    async def end_silently(request: PrefillRequest):
        return
        yield

    async with worker_rig(CONFIG) as rig:
        await ask(rig)
        rig.prefill.script = [end_silently, end_silently]
        end = await ask(rig, longer)
        assert (end.prefilled_by, end.cached_tokens) == ("decode-0", HIT)
        assert computed(rig) == (21, len(longer) - HIT)


async def test_hit_is_read_by_others_while_a_transfer_behind_it_is_fenced():
    """Only what a transfer may write to is kept from use."""
    longer = (*PROMPT, *range(200, 210))
    async with worker_rig(
        CONFIG,
        transport=FaultyTransport(),
        faults_of=lambda number: (Fault(FaultKind.DIE, 1),) if number == 1 else (),
    ) as rig:
        await ask(rig)
        rig.transport.faulty.closing.clear()  # set by the first transfer
        rig.transport.faulty.hold_fence()
        client = Client(rig, generate_request(longer, SamplingParams(max_tokens=2)))
        await rig.transport.faulty.wait_closing()
        client.leave()
        await client.left()
        await until(lambda: rig.side.pool.counts().quarantined > 0)
        other = Client(rig, generate_request(PROMPT, SamplingParams(max_tokens=NUM_TOKENS)))
        assert (await other.finished()).cached_tokens == HIT
        assert other.token_ids == generate(PROMPT, NUM_TOKENS)
        rig.transport.faulty.pass_fence()
        await rig.settled()
