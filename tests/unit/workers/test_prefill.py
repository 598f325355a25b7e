"""The prefill worker over a real sender, asked directly as a decode worker would ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kv_transfer.geometry import BlockId
from kv_transfer.handoff import PeerInfo, TransferKey
from kv_transfer.incoming import IncomingTransfer
from kv_transfer.transport import LeaseLostError
from tests.fakes.model_runner import generate
from tests.fakes.until import until
from tests.fakes.worker_rig import BLOCK_SIZE, ByteModelRunner, Rig, RigConfig, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.engine.sequence import SequenceStatus
from workers.engine.step import StepPlan
from workers.messages import (
    FailureCode,
    PrefillAccepted,
    PrefillEnded,
    PrefillEvent,
    PrefillRefused,
    PrefillRequest,
)
from workers.prefill import PrefillWorker

PROMPT = tuple(range(100, 121))
"""21 tokens: six blocks, three chunks."""
NUM_BLOCKS = 6
LONG = tuple(range(56))
"""With its output a whole window; two of them leave no room for PROMPT."""
PATIENCE_S = 20.0


class Bench:
    """One prefill worker, and the receiver of a decode worker that is not asked."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.worker: PrefillWorker = rig.prefill_workers[0]
        self.side = rig.prefill_sides[0]
        assert isinstance(self.side.runner, ByteModelRunner)
        self.runner: ByteModelRunner = self.side.runner

    def ask(
        self,
        transfer_id: str = "t",
        *,
        epoch: int = 0,
        prompt: tuple[int, ...] = PROMPT,
        decode: PeerInfo | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[PrefillEvent]:
        return self.worker.prefill(
            PrefillRequest(
                request_id=f"request-{transfer_id}",
                transfer_id=transfer_id,
                epoch=epoch,
                decode=decode or self.rig.side.info,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=8),
                timeout_s=timeout_s,
            )
        )

    async def accepted(self, answers: AsyncIterator[PrefillEvent]) -> PrefillAccepted:
        answer = await in_time(anext(answers))
        assert isinstance(answer, PrefillAccepted), answer
        return answer

    async def refused(self, answers: AsyncIterator[PrefillEvent]) -> PrefillRefused:
        """The refusal, after which there must be nothing."""
        answer = await in_time(anext(answers))
        assert isinstance(answer, PrefillRefused), answer
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        return answer

    async def outcome(self, answers: AsyncIterator[PrefillEvent]) -> str:
        """How an accepted call ended; nothing may come after it."""
        answer = await in_time(anext(answers))
        assert isinstance(answer, PrefillEnded), answer
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        return answer.outcome

    async def held(self) -> None:
        """Return once the prompt is computed and kept."""
        await until(lambda: self.side.scheduler.count_by_status() == {SequenceStatus.HELD: 1})

    def incoming(
        self, accepted: PrefillAccepted, prompt: tuple[int, ...] = PROMPT
    ) -> IncomingTransfer:
        places = [BlockId(number) for number in range(-(-len(prompt) // BLOCK_SIZE))]
        return self.rig.receiver.transfer(accepted.peer, accepted.key, places, len(prompt), 10.0)

    async def empty(self) -> None:
        """Return once the worker holds nothing; then check what must hold."""
        await until(lambda: self.side.is_empty and not self.worker.stats()[1].active_leases)
        self.rig.check()


@asynccontextmanager
async def bench(config: RigConfig | None = None) -> AsyncIterator[Bench]:
    async with worker_rig(config or RigConfig()) as rig:
        yield Bench(rig)


async def in_time(waiting):
    async with asyncio.timeout(PATIENCE_S):
        return await waiting


# -- a hand-off that goes well ------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 10, 16, 21])
async def test_prompt_is_granted_whole_with_its_first_token(num_tokens):
    """Prompts that end with a block, with a chunk, and with neither."""
    prompt = PROMPT[:num_tokens]
    async with bench() as made:
        answers = made.ask(prompt=prompt)
        accepted = await made.accepted(answers)
        landed = await made.incoming(accepted, prompt).pull()

        assert await made.outcome(answers) == "confirmed"
        assert landed.first.token_id == generate(prompt, 1)[0]
        assert made.rig.side.runner.read(range(8), num_tokens) == list(prompt)
        await made.empty()


async def test_blocks_are_granted_before_the_prompt_is_whole():
    async with bench() as made:
        begun: list[int] = []

        def hold_second(plan: StepPlan) -> None:
            if len(begun) == 1:
                made.runner.hold()
            begun.append(plan.step_id)

        made.runner.on_execute = hold_second
        answers = made.ask()
        transfer = made.incoming(await made.accepted(answers))
        pulling = asyncio.create_task(transfer.pull())
        await until(lambda: len(begun) == 2)
        await until(lambda: made.rig.side.runner.read([0, 1], 8) == list(PROMPT[:8]))
        assert not pulling.done()
        made.runner.let_go()
        await in_time(pulling)
        assert await made.outcome(answers) == "confirmed"


async def test_blocks_are_kept_until_the_reader_is_done():
    async with bench() as made:
        answers = made.ask()
        accepted = await made.accepted(answers)
        await made.held()
        assert made.side.pool.counts().used == NUM_BLOCKS
        await made.incoming(accepted).pull()
        assert await made.outcome(answers) == "confirmed"
        await made.empty()
        assert made.worker.stats()[0].finished == 1


async def test_closing_after_the_end_revokes_nothing():
    async with bench() as made:
        answers = made.ask()
        transfer = made.incoming(await made.accepted(answers))
        await transfer.pull()
        await answers.aclose()
        await made.empty()
        ended = made.worker.stats()[1].ended
        assert [reason.value for reason in ended] == ["confirmed"]


# -- a hand-off that is given up ----------------------------------------------------------------


async def test_reader_that_leaves_ends_a_waiting_prompt():
    async with bench() as made:
        made.runner.hold()
        fillers = [made.ask(f"filler-{i}", prompt=LONG) for i in range(2)]
        for filler in fillers:
            await made.accepted(filler)
        answers = made.ask()
        await made.accepted(answers)
        assert made.side.scheduler.num_waiting == 1
        await answers.aclose()
        await until(lambda: made.side.scheduler.num_waiting == 0)
        for filler in fillers:
            await filler.aclose()
        made.runner.let_go()
        await made.empty()


async def test_reader_that_leaves_ends_a_prompt_in_computation():
    async with bench() as made:
        made.runner.hold()
        answers = made.ask()
        await made.accepted(answers)
        await until(made.runner.begun.is_set)
        await answers.aclose()
        await until(lambda: made.side.scheduler.num_live == 0)
        assert not made.side.is_empty, "the step in flight still writes to its blocks"
        made.runner.let_go()
        await made.empty()
        assert len(made.runner.plans) == 1, "nothing more was computed for nobody"


async def test_reader_that_leaves_ends_a_prompt_that_is_held():
    async with bench() as made:
        answers = made.ask()
        accepted = await made.accepted(answers)
        await made.held()
        await answers.aclose()
        await made.empty()
        with pytest.raises(LeaseLostError):
            await made.incoming(accepted).pull()


async def test_reader_that_is_cancelled_while_it_waits_for_the_end():
    async with bench() as made:
        answers = made.ask()
        await made.accepted(answers)
        waiting = asyncio.create_task(anext(answers))
        await made.held()
        waiting.cancel()
        await asyncio.wait({waiting})
        await made.empty()


async def test_reader_that_never_comes_loses_its_lease():
    async with bench(RigConfig(lease_s=0.05)) as made:
        answers = made.ask()
        await made.accepted(answers)
        assert await made.outcome(answers) == "expired"
        await made.empty()


async def test_pool_that_is_full_of_dead_hand_offs_empties_itself():
    """F17: nothing new has to come for what is over to be cleared away."""
    prompts = (LONG, LONG, PROMPT[:16])
    async with bench(RigConfig(lease_s=0.05)) as made:
        made.runner.hold()
        answers = [made.ask(f"t-{i}", prompt=prompt) for i, prompt in enumerate(prompts)]
        for answer in answers:
            await made.accepted(answer)
        assert made.side.pool.num_available == 0
        made.runner.let_go()
        assert [await made.outcome(answer) for answer in answers] == ["expired"] * 3
        await made.empty()


async def test_reader_that_leaves_during_the_last_chunk_is_granted_nothing_of_it():
    """F39: the prompt ends in the step in which its sequence has ended."""
    prompt = PROMPT[:8]  # one chunk
    async with bench() as made:
        made.runner.hold()
        answers = made.ask(prompt=prompt)
        transfer = made.incoming(await made.accepted(answers), prompt)
        pulling = asyncio.create_task(transfer.pull())
        await until(made.runner.begun.is_set)
        await until(made.rig.transport.connected.is_set)
        await answers.aclose()
        made.runner.let_go()
        await asyncio.wait({pulling})
        assert isinstance(pulling.exception(), LeaseLostError)
        await made.empty()
        assert made.rig.receiver.stats().digests_checked == 0
        assert made.worker.stats()[0].finished == 0


async def test_reader_that_releases_is_done():
    async with bench() as made:
        made.runner.hold()
        answers = made.ask()
        transfer = made.incoming(await made.accepted(answers))
        pulling = asyncio.create_task(transfer.pull())
        await until(made.rig.transport.connected.is_set)
        transfer.release()
        assert await made.outcome(answers) in ("released", "peer_lost")
        await asyncio.wait({pulling})
        assert isinstance(pulling.exception(), LeaseLostError)
        made.runner.let_go()
        await made.empty()


async def test_failed_step_is_told_in_words():
    async with bench() as made:
        made.runner.errors = [RuntimeError("secret prompt")]
        answers = made.ask()
        await made.accepted(answers)
        outcome = await made.outcome(answers)
        await made.empty()
        assert outcome == "step 0 failed with RuntimeError"


async def test_deadline_ends_the_computation():
    async with bench() as made:
        made.runner.hold()
        answers = made.ask(timeout_s=5.0)
        await made.accepted(answers)
        await until(made.runner.begun.is_set)
        made.rig.clock.advance(6.0)
        made.runner.let_go()
        assert "deadline passed" in await made.outcome(answers)
        await made.empty()


async def test_newer_attempt_ends_the_older():
    async with bench() as made:
        older = made.ask()
        await made.accepted(older)
        newer = made.ask(epoch=1)
        transfer = made.incoming(await made.accepted(newer))
        assert await made.outcome(older) != "confirmed"
        await transfer.pull()
        assert await made.outcome(newer) == "confirmed"
        await made.empty()


# -- refusals -----------------------------------------------------------------------------------


async def test_queue_that_is_full_refuses():
    async with bench(RigConfig(queue_limit=0)) as made:
        made.runner.hold()
        fillers = [made.ask(f"filler-{i}", prompt=LONG) for i in range(2)]
        for filler in fillers:
            await made.accepted(filler)
        refused = await made.refused(made.ask())
        assert refused.code is FailureCode.QUEUE_FULL
        for filler in fillers:
            await filler.aclose()
        made.runner.let_go()
        await made.empty()


async def test_prompt_beyond_the_window_is_refused_with_the_numbers():
    async with bench() as made:
        refused = await made.refused(made.ask(prompt=tuple(range(64 + 1))))
        assert refused.code is FailureCode.CONTEXT_LENGTH_EXCEEDED
        assert "65" in refused.message
        await made.empty()


async def test_request_that_is_too_late_is_refused():
    async with bench() as made:
        refused = await made.refused(made.ask(timeout_s=0.0))
        assert refused.code is FailureCode.DEADLINE_EXCEEDED
        await made.empty()


async def test_decode_worker_with_another_layout_is_refused():
    async with bench() as made:
        other = replace(made.rig.side.info, fingerprint="0" * 32)
        refused = await made.refused(made.ask(decode=other))
        assert refused.code is FailureCode.INTERNAL
        assert "fingerprint" in refused.message
        await made.empty()


async def test_attempt_that_is_older_is_refused():
    async with bench() as made:
        newer = made.ask(epoch=1)
        await made.accepted(newer)
        refused = await made.refused(made.ask(epoch=0))
        assert "epoch" in refused.message
        await newer.aclose()
        await made.empty()


async def test_refused_prompt_may_be_asked_for_again():
    async with bench(RigConfig(queue_limit=0)) as made:
        made.runner.hold()
        filler = made.ask("filler", prompt=LONG)
        other = made.ask("other", prompt=LONG)
        await made.accepted(filler)
        await made.accepted(other)
        await made.refused(made.ask())
        await filler.aclose()
        await other.aclose()
        made.runner.let_go()
        await until(lambda: made.side.is_empty)
        again = made.ask(epoch=1)
        await made.incoming(await made.accepted(again)).pull()
        assert await made.outcome(again) == "confirmed"


# -- stop and failure ---------------------------------------------------------------------------


async def test_stop_ends_every_call_with_a_reply():
    async with bench() as made:
        made.runner.hold()
        calls = [made.ask(f"t-{i}", prompt=LONG) for i in range(3)]
        for call in calls:
            await made.accepted(call)
        stopping = asyncio.create_task(made.worker.stop())
        outcomes = [await made.outcome(call) for call in calls]
        made.runner.let_go()
        await stopping
        await made.empty()
        assert outcomes == ["revoked"] * 3


async def test_worker_that_stops_or_has_stopped_refuses():
    async with bench() as made:
        made.runner.hold()
        await made.accepted(made.ask("first"))
        await until(made.runner.begun.is_set)
        stopping = asyncio.create_task(made.worker.stop())
        await asyncio.sleep(0)
        during = await made.refused(made.ask("during"))
        made.runner.let_go()
        await stopping
        after = await made.refused(made.ask("after"))
        assert during.code is after.code is FailureCode.WORKER_STOPPING


async def test_engine_that_fails_ends_every_call_and_refuses_more():
    async with bench() as made:
        made.runner.errors = [RuntimeError("broken"), RuntimeError("still broken")]
        first, second = made.ask("t-0"), made.ask("t-1", prompt=(1, 2))
        for call in (first, second):
            await made.accepted(call)
        await made.outcome(first)
        await made.outcome(second)
        third = made.ask("t-2")
        await made.accepted(third)
        await made.outcome(third)
        await until(lambda: not made.worker.healthy)
        refused = await made.refused(made.ask("t-3"))
        assert refused.code is FailureCode.WORKER_STOPPING
        await until(lambda: made.worker.stats()[1].active_leases == 0)


async def test_address_is_known_only_after_the_start():
    async with bench() as made:
        assert made.worker.me.endpoint("tcp")
        unstarted = PrefillWorker(
            engine=made.side.engine, sender=None, layout=made.rig.config.layout
        )
        with pytest.raises(RuntimeError, match="not been started"):
            _ = unstarted.me


async def test_key_names_both_processes():
    async with bench() as made:
        answers = made.ask("named", epoch=3)
        accepted = await made.accepted(answers)
        await answers.aclose()
        assert accepted.key == TransferKey(
            transfer_id="named",
            epoch=3,
            prefill_incarnation="prefill-0-1",
            decode_incarnation="decode-0-1",
        )
