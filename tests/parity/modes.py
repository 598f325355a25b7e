"""The ways to a token: who computes what, in which company, in which pieces.

Each mode proves that it was one: a mode that fell back to another would compare nothing new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tests.fakes.worker_rig import ModelFactory, Rig, RigConfig, generate_request, worker_rig
from tests.parity.references import Reference
from tests.parity.subjects import Subject
from workers.decode import DecodeWorker
from workers.decode_config import DecodeConfig
from workers.engine.sampling_params import SamplingParams
from workers.engine.step import StepPlan, StepResult
from workers.engine.step_thread import ModelRunner
from workers.messages import Failed, Finished, GenerateRequest, TokenFrame

__all__ = ["MODES", "Mode", "generate"]

_PATIENCE_S = 3000.0
"""A hang shows as such; the machine may be as slow as it likes."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """What the workers' steps were like, seen from outside."""

    widest: int = 0
    """Sequences of one step at most."""
    decoded_together: int = 0
    """Decoding sequences of one step at most."""
    cut_prompts: int = 0
    """Prompt chunks that were not the whole prompt."""
    mixed: int = 0
    """Steps with both a decode and a prompt chunk."""
    went_on: int = 0
    """Prompts that ended in output of an earlier attempt, and got their next token."""

    def see(self, plan: StepPlan) -> None:
        """Note one step."""
        decodes = sum(entry.num_output_tokens > 0 for entry in plan.sequences)
        self.widest = max(self.widest, len(plan.sequences))
        self.decoded_together = max(self.decoded_together, decodes)
        self.cut_prompts += sum(entry.sampling is None for entry in plan.sequences)
        self.went_on += sum(
            entry.num_output_tokens > 0 and len(entry.token_ids) > 1 for entry in plan.sequences
        )
        self.mixed += 0 < decodes < len(plan.sequences)

    def around(self, model: ModelFactory) -> ModelFactory:
        """The same model, watched."""

        def make(num_blocks: int):
            runner, memory = model(num_blocks)
            return _WatchedRunner(runner, self), memory

        return make


class _WatchedRunner:
    def __init__(self, runner: ModelRunner, watch: Watch) -> None:
        self.choice = runner.choice
        self._runner = runner
        self._watch = watch

    def execute(self, plan: StepPlan) -> StepResult:
        self._watch.see(plan)
        return self._runner.execute(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How requests are served, and what shows that they were served so."""

    name: str
    together: int
    """Requests in flight at most."""
    is_proven: Callable[[Rig, Watch], bool]
    at_least: int = 0
    """Requests that are needed to show it."""
    num_prefill: int = 0
    num_decode: int = 1
    chunk_tokens: int | None = None
    """Prompt tokens of one sequence in a step; None is as much as a step holds."""
    has_prefix_cache: bool = False
    """Then every prompt is asked again, and once more with half of its answer in it."""
    is_resumed: bool = False
    """Then each request loses its decode worker after half of its answer; another one goes on."""

    def config(self, subject: Subject) -> RigConfig:
        """The workers for a model."""
        window = subject.max_model_len
        chunk = self.chunk_tokens or window
        return RigConfig(
            layout=subject.layout,
            num_blocks=self._num_blocks(subject),
            max_model_len=window,
            max_sequences=16,
            # Room for the decodes beside a chunk and half of another's.
            step_tokens=16 + chunk + (chunk // 2 if self.chunk_tokens else 0),
            prefill_chunk_tokens=chunk,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            prefix_cache=self.has_prefix_cache,
            queue_limit=64,
            decode=DecodeConfig(local_prefill_tokens=0, transfer_deadline_s=_PATIENCE_S),
        )

    def waves(self, subject: Subject) -> list[list[Reference]]:
        """What is asked for; a wave begins when the one before has its answers.

        A subject's prompts, with repetitions if there are fewer than are to run together.
        """
        references = list(subject.references)
        if self.has_prefix_cache:
            turns = [ref.continued(len(ref.tokens) // 2) for ref in references]
            return [references, references, turns]
        return [references * (-(-self.at_least // len(references)) or 1)]

    def _num_blocks(self, subject: Subject) -> int:
        """Room for the largest requests that may run together, and for a window."""

        def blocks_for(num_tokens: int) -> int:
            chunk = self.chunk_tokens or subject.max_model_len
            return subject.layout.sequence_blocks(num_tokens, chunk_tokens=chunk)

        largest = sorted(
            (
                blocks_for(len(reference.prompt) + len(reference.tokens))
                for wave in self.waves(subject)
                for reference in wave
            ),
            reverse=True,
        )
        # A cache keeps all that was asked: what it had to evict would be no hit.
        held = largest if self.has_prefix_cache else largest[: self.together]
        return max(blocks_for(subject.max_model_len), sum(held))


def _all_moved(rig: Rig, watch: Watch) -> bool:
    """Every prompt was computed on a prefill worker, none fell back."""
    handoffs = [end.worker.stats()[2] for end in rig.decode_ends]
    return all(h.placed("remote") > 0 and not h.placed("fallback") for h in handoffs) and not any(
        h.placed("local") for h in handoffs
    )


def _all_took_part(rig: Rig, watch: Watch) -> bool:
    computed = [side.scheduler.totals.prompt_tokens for side in rig.prefill_sides]
    return _all_moved(rig, watch) and all(computed)


def _all_went_on(rig: Rig, watch: Watch) -> bool:
    """Both decode workers went on from tokens of the other one."""
    finished = [end.side.scheduler.totals.finished for end in rig.decode_ends]
    return _all_moved(rig, watch) and all(finished) and watch.went_on > 0


def _all_hit(rig: Rig, watch: Watch) -> bool:
    """At least every second prompt token was found rather than computed, wherever it was sought."""
    totals = [side.scheduler.totals for side in rig.sides]
    return all(2 * total.hit_tokens > total.queried_tokens for total in totals)


MODES = (
    Mode(
        name="colocated",
        together=1,
        is_proven=lambda rig, watch: watch.widest == 1 and not watch.cut_prompts,
    ),
    Mode(
        name="split",
        together=4,
        num_prefill=1,
        is_proven=_all_moved,
    ),
    Mode(
        name="chunked",
        together=4,
        chunk_tokens=13,  # no multiple of a block, and less than most prompts
        is_proven=lambda rig, watch: watch.cut_prompts > 0 and watch.mixed > 0,
    ),
    Mode(
        name="prefix hit",
        together=4,
        has_prefix_cache=True,
        is_proven=_all_hit,
    ),
    Mode(
        name="hit, split",
        together=4,
        num_prefill=1,
        has_prefix_cache=True,
        is_proven=_all_hit,
    ),
    Mode(
        name="16 at once",
        together=16,
        at_least=16,
        is_proven=lambda rig, watch: watch.decoded_together == 16,
    ),
    Mode(
        name="2 x 2",
        together=8,
        at_least=4,
        num_prefill=2,
        num_decode=2,
        chunk_tokens=64,
        is_proven=_all_took_part,
    ),
    Mode(
        name="resumed",
        together=4,
        num_prefill=1,
        num_decode=2,
        is_resumed=True,
        is_proven=_all_went_on,
    ),
)


def greedy(number: int, reference: Reference) -> SamplingParams:
    """As many tokens as the reference has, the likeliest each time."""
    return SamplingParams(max_tokens=len(reference.tokens), temperature=0.0)


async def generate(
    mode: Mode,
    subject: Subject,
    sampling: Callable[[int, Reference], SamplingParams] = greedy,
) -> list[tuple[Reference, tuple[int, ...]]]:
    """Serve every prompt of a subject in a mode; what should come if greedy, with what came."""
    watch = Watch()
    served: list[tuple[Reference, tuple[int, ...]]] = []
    async with worker_rig(mode.config(subject), model=watch.around(subject.model)) as rig:
        workers = [end.worker for end in rig.decode_ends]
        places = asyncio.Semaphore(mode.together)
        for wave in mode.waves(subject):
            requests = [
                generate_request(reference.prompt, sampling(number, reference), number=number)
                for number, reference in enumerate(wave, start=len(served))
            ]
            ask = _ask_twice if mode.is_resumed else _ask
            answers = await asyncio.gather(*(ask(workers, request, places) for request in requests))
            await rig.settled()
            served += zip(wave, answers, strict=True)
        assert mode.is_proven(rig, watch), f"{mode.name} was not what ran: {watch}"
    return served


async def _ask(
    workers: Sequence[DecodeWorker], request: GenerateRequest, places: asyncio.Semaphore
) -> tuple[int, ...]:
    """The answer of one decode worker, of each in turn."""
    async with places, asyncio.timeout(_PATIENCE_S):
        return await _read(_in_turn(workers, request), request)


async def _ask_twice(
    workers: Sequence[DecodeWorker], request: GenerateRequest, places: asyncio.Semaphore
) -> tuple[int, ...]:
    """The first half of one decode worker's answer, and what another one makes of the rest."""
    half = request.sampling.max_tokens // 2
    async with places, asyncio.timeout(_PATIENCE_S):
        first = await _read(_in_turn(workers, request), request, leave_after=half)
        again = replace(request, attempt=request.attempt + 1, resumed_token_ids=first)
        other = _in_turn(workers, request, step=1)
        return first + await _read(other, again)


def _in_turn(
    workers: Sequence[DecodeWorker], request: GenerateRequest, *, step: int = 0
) -> DecodeWorker:
    number = int(request.request_id.rpartition("-")[2])
    return workers[(number + step) % len(workers)]


async def _read(
    worker: DecodeWorker, request: GenerateRequest, *, leave_after: int | None = None
) -> tuple[int, ...]:
    """The tokens of an answer, all or the first ones."""
    tokens: list[int] = []
    async with aclosing(worker.generate(request)) as events:
        async for event in events:
            match event:
                case TokenFrame():
                    tokens.extend(event.token_ids)
                case Failed():
                    raise AssertionError(f"{request.request_id} failed: {event}")
                case Finished():
                    break
            if leave_after is not None and len(tokens) >= leave_after:
                break
    return tuple(tokens[:leave_after])
