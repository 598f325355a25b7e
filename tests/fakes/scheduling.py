"""Small schedulers and sequences for tests, and one step of them without a model."""

from __future__ import annotations

from collections.abc import Mapping

from kv_transfer.geometry import KVGroup
from tests.fakes.model_runner import Windows
from workers.engine.block_pool import BlockPool
from workers.engine.events import Event
from workers.engine.prefix_cache import PrefixScope
from workers.engine.sampling_params import SamplingParams
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_config import SchedulerConfig
from workers.engine.sequence import SequenceMode, SequenceSpec
from workers.engine.step import SequenceId, StepPlan, StepResult

BLOCK_SIZE = 4
SCOPE = PrefixScope(fingerprint="a model in a layout", block_size=BLOCK_SIZE)


def make_scheduler(
    *,
    num_blocks: int = 16,
    max_model_len: int = 32,
    max_sequences: int = 4,
    step_tokens: int = 8,
    prefill_chunk_tokens: int = 4,
    queue_limit: int = 8,
    aging_s: float = 10.0,
    scope: PrefixScope | None = None,
    scored_tokens: int = 128,
    windows: Windows = (None,),
    step_target_s: float | None = None,
    gap_target_s: float | None = None,
) -> Scheduler:
    """A scheduler small enough to reach its limits in a few calls; a scope turns hits on."""
    groups = tuple(KVGroup(layers=(i,), sliding_window=w) for i, w in enumerate(windows))
    pool = BlockPool(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        window_blocks=sum(
            group.max_blocks(
                max_model_len, chunk_tokens=prefill_chunk_tokens, block_size=BLOCK_SIZE
            )
            for group in groups
        ),
        sliding_windows=windows,
    )
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        queue_limit=queue_limit,
        aging_s=aging_s,
        scored_tokens=scored_tokens,
        step_target_s=step_target_s,
        gap_target_s=gap_target_s,
    )
    return Scheduler(pool, config, scope, groups=groups)


def make_spec(
    number: int = 0,
    *,
    prompt: int = 4,
    max_tokens: int = 4,
    mode: SequenceMode = SequenceMode.GENERATE,
    priority: int = 0,
    deadline: float | None = None,
    stop: frozenset[int] = frozenset(),
    salt: str = "",
    looks_up: bool = True,
    num_resumed: int = 0,
) -> SequenceSpec:
    """A sequence whose prompt is 0, 1, 2 ..., the last num_resumed of them output."""
    return SequenceSpec(
        sequence_id=SequenceId(number),
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop,
            prompt_logprobs=None if looks_up else 0,
        ),
        mode=mode,
        priority=priority,
        deadline=deadline,
        cache_salt=salt,
        num_resumed=num_resumed,
    )


def result_of(plan: StepPlan, tokens: Mapping[int, int] | None = None) -> StepResult:
    """A step that sampled what it was asked for: token 100, unless tokens says otherwise."""
    chosen = tokens or {}
    sampled = {
        entry.sequence_id: chosen.get(entry.sequence_id, 100)
        for entry in plan.sequences
        if entry.sampling is not None
    }
    return StepResult(step_id=plan.step_id, token_ids=sampled)


def must_plan(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    """The next step, which there must be."""
    plan = scheduler.plan(now)
    assert plan is not None, "there was nothing to compute"
    return plan


def step(
    scheduler: Scheduler, tokens: Mapping[int, int] | None = None, now: float = 0.0
) -> StepPlan:
    """Plan and commit one step."""
    plan = must_plan(scheduler, now)
    scheduler.commit(result_of(plan, tokens))
    return plan


def run_dry(scheduler: Scheduler) -> None:
    """Step until nothing is left to compute."""
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(result_of(plan))


def kinds(events: list[Event]) -> list[str]:
    """The events' names, in order."""
    return [type(event).__name__ for event in events]


def rows(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of each row group of the next step, which is committed."""
    plan = step(scheduler)
    return [(entry.sequence_id, entry.start, len(entry.token_ids)) for entry in plan.sequences]


def free_blocks(scheduler: Scheduler) -> int:
    """Blocks that could be reserved now."""
    return scheduler.pool.num_available
