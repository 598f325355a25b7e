"""Workers' stats as samples of the metrics in `deployments.metrics`, and all that they show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from deployments.metrics import Sample, WorkerSnapshot, loop_sample, sample
from kv_transfer.durations import DurationCounts
from kv_transfer.receiver_stats import ReceiverStats
from kv_transfer.sender import SenderStats
from workers.decode import DecodeWorker, HandoffStats
from workers.engine.loop import EngineStats
from workers.placement import PLACES
from workers.prefill import PrefillWorker
from workers.runner_choice import RunnerChoice


def prefill_snapshot(worker: PrefillWorker, *, num_strangers: int) -> WorkerSnapshot:
    """A prefill worker's share of `/metrics`; its process has refused so many calls."""
    engine, sender = worker.stats()
    samples = (*_engine(engine), *_sender(sender))
    return _snapshot(worker, "prefill", samples, sender.strangers + num_strangers)


def decode_snapshot(worker: DecodeWorker, *, num_strangers: int) -> WorkerSnapshot:
    """A decode worker's share; its process has refused so many connections and calls."""
    engine, receiver, handoff = worker.stats()
    transfers = _receiver(receiver) if receiver is not None else ()
    samples = (*_engine(engine), *transfers, *_handoff(handoff))
    return _snapshot(worker, "decode", samples, num_strangers)


def _snapshot(
    worker: PrefillWorker | DecodeWorker,
    role: str,
    samples: tuple[Sample, ...],
    num_strangers: int,
) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=worker.me.worker_id,
        role=role,
        runner=worker.runner_choice,
        samples=(
            _runner(worker.runner_choice),
            *samples,
            sample("baton_strangers_total", num_strangers),
            loop_sample(),
        ),
    )


def _runner(choice: RunnerChoice) -> Sample:
    return sample("baton_runner_info", 1, tier=choice.tier, cause=choice.cause)


def _engine(stats: EngineStats) -> Iterator[Sample]:
    blocks = {
        "free": stats.free_blocks,
        "reserved": stats.reserved_blocks,
        "used": stats.used_blocks,
        "cached": stats.cached_blocks,
        "quarantined": stats.quarantined_blocks,
        "total": stats.total_blocks,
    }
    for state, count in blocks.items():
        yield sample("baton_kv_blocks", count, state=state)
    yield sample("baton_kv_block_size_tokens", stats.block_size)
    for status, count in stats.by_status.items():
        yield sample("baton_sequences", count, status=status.value)
    yield sample("baton_sequences_limit", stats.max_sequences)
    yield sample("baton_queue_length", stats.waiting)
    yield sample("baton_queue_limit", stats.queue_limit)
    ended = {"finished": stats.finished, "aborted": stats.aborted, "failed": stats.failed}
    for outcome, count in ended.items():
        yield sample("baton_sequences_ended_total", count, outcome=outcome)
    yield sample("baton_computed_prompt_tokens_total", stats.prompt_tokens)
    if stats.prompt_token_s is not None:
        yield sample("baton_prompt_token_seconds", stats.prompt_token_s)
    yield sample("baton_output_tokens_total", stats.output_tokens)
    yield sample("baton_prefix_queried_tokens_total", stats.prefix_queried_tokens)
    yield sample("baton_prefix_hit_tokens_total", stats.prefix_hit_tokens)
    yield sample("baton_prefix_stored_blocks_total", stats.stored_blocks)
    yield sample("baton_prefix_evicted_blocks_total", stats.evicted_blocks)
    yield sample("baton_steps_total", stats.steps)
    yield sample("baton_failed_steps_total", stats.failed_steps)
    yield sample("baton_step_seconds_total", stats.step_seconds)


def _receiver(stats: ReceiverStats) -> Iterator[Sample]:
    yield sample("baton_transfers_active", stats.active)
    for outcome, count in stats.by_outcome.items():
        yield sample("baton_transfers_total", count, outcome=outcome)
    yield sample("baton_transfer_blocks_total", stats.blocks_published, direction="received")
    yield from _bytes("received", stats.bytes_published)
    for transport, count in stats.bytes_discarded.items():
        yield sample("baton_transfer_discarded_bytes_total", count, transport=transport)
    for outcome, seconds in stats.seconds_lost.items():
        yield sample("baton_transfer_lost_seconds_total", seconds, outcome=outcome)
    for peer, choice in stats.links.items():
        labels = {"peer": peer, "transport": choice.transport, "reason": choice.reason.value}
        yield sample("baton_link_info", 1, **labels)
    yield from _histogram("baton_handoff_fetch_seconds", stats.fetch)
    yield from _histogram("baton_handoff_wait_seconds", stats.wait)
    yield sample("baton_digests_checked_total", stats.digests_checked)


def _histogram(name: str, durations: DurationCounts) -> Iterator[Sample]:
    count = 0
    for bound, count in durations.cumulative():
        le = "+Inf" if math.isinf(bound) else str(float(bound))
        yield sample(f"{name}_bucket", count, le=le)
    yield sample(f"{name}_count", count)
    yield sample(f"{name}_sum", durations.total_s)


def _sender(stats: SenderStats) -> Iterator[Sample]:
    yield sample("baton_leases_active", stats.active_leases)
    yield sample("baton_leases_opened_total", stats.opened)
    yield sample("baton_leases_refused_total", stats.refused)
    yield sample("baton_lease_renewals_total", stats.renewals)
    for reason, count in stats.ended.items():
        yield sample("baton_leases_ended_total", count, reason=reason.value)
    for verdict, count in stats.confirms.items():
        yield sample("baton_confirms_total", count, verdict=verdict.value)
    yield sample("baton_transfer_blocks_total", stats.blocks_confirmed, direction="sent")
    yield from _bytes("sent", stats.bytes_confirmed)


def _bytes(direction: str, by_transport: Mapping[str, int]) -> Iterator[Sample]:
    for transport, count in by_transport.items():
        yield sample("baton_transfer_bytes_total", count, direction=direction, transport=transport)


def _handoff(stats: HandoffStats) -> Iterator[Sample]:
    for place, reasons in PLACES.items():
        for reason in reasons:
            count = stats.prompts.get((place, reason), 0)
            labels = {"place": place, "reason": reason.value}
            yield sample("baton_prompts_placed_total", count, **labels)
    for error, count in stats.failures.items():
        yield sample("baton_handoff_failures_total", count, error=error)
