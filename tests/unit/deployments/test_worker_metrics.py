"""What `/metrics` shows of workers that have handed a prompt over."""

from __future__ import annotations

import pytest

from deployments.worker_metrics import decode_snapshot, prefill_snapshot
from tests.fakes.stream_kinds import STREAM_KINDS
from tests.fakes.transport import Fault, FaultKind, FaultyTransport
from tests.fakes.worker_rig import FAKE_LAYOUT, Client, fake_model, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.runner_choice import RunnerChoice

PROMPT = range(100, 110)
LAST_BLOCK = 2
"""Of the three that hold `PROMPT`: whatever order grants and blocks come in, two come before it."""


def values(snapshot, name):
    return {
        tuple(sorted(dict(item.labels).items())): item.value
        for item in snapshot.samples
        if item.name == name
    }


@pytest.mark.parametrize("kind", STREAM_KINDS, ids=lambda kind: kind.name)
async def test_each_link_shows_its_transport_and_why(kind):
    async with worker_rig(transport=kind.transport()) as rig:
        before = decode_snapshot(rig.decode, num_strangers=3)
        request = generate_request(PROMPT, SamplingParams(max_tokens=2))
        await Client(rig, request).finished()
        await rig.settled()
        decode, prefill = (
            decode_snapshot(rig.decode, num_strangers=3),
            prefill_snapshot(rig.prefill_workers[0], num_strangers=2),
        )

    for name in ("baton_handoff_wait_seconds", "baton_handoff_fetch_seconds"):
        assert values(before, f"{name}_count") == {(): 0}
        assert values(decode, f"{name}_count") == {(): 1}
        assert values(decode, f"{name}_bucket")[(("le", "+Inf"),)] == 1
        assert values(decode, f"{name}_sum")[()] > 0
    name = kind.name
    link = (("peer", "prefill-0"), ("reason", "only_one"), ("transport", name))
    assert values(prefill, "baton_strangers_total") == {(): 2}
    assert values(decode, "baton_strangers_total") == {(): 3}
    assert values(before, "baton_link_info") == {}
    assert values(decode, "baton_link_info") == {link: 1}
    size = 3 * FAKE_LAYOUT.bytes_per_block
    for snapshot, direction, count in (
        (before, "received", 0),
        (decode, "received", size),
        (prefill, "sent", size),
    ):
        labels = (("direction", direction), ("transport", name))
        assert values(snapshot, "baton_transfer_bytes_total") == {labels: count}


async def test_each_worker_shows_how_it_runs_its_model_and_why():
    def gave_way(num_blocks):
        runner, memory = fake_model(num_blocks)
        runner.choice = RunnerChoice(tier="stock", cause="own_differs", reason="by two steps")
        return runner, memory

    async with worker_rig(model=gave_way) as rig:
        shown = [
            decode_snapshot(rig.decode, num_strangers=3),
            prefill_snapshot(rig.prefill_workers[0], num_strangers=2),
        ]

    for snapshot in shown:
        assert values(snapshot, "baton_runner_info") == {
            (("cause", "own_differs"), ("tier", "stock")): 1
        }


async def test_what_failed_transfers_cost_is_shown_by_transport_and_outcome():
    async with worker_rig(transport=FaultyTransport(Fault(FaultKind.CORRUPT, LAST_BLOCK))) as rig:
        request = generate_request(PROMPT, SamplingParams(max_tokens=2))
        await Client(rig, request).finished()
        await rig.settled()
        snapshot = decode_snapshot(rig.decode, num_strangers=3)

    discarded = values(snapshot, "baton_transfer_discarded_bytes_total")
    lost = values(snapshot, "baton_transfer_lost_seconds_total")
    both_attempts = 2 * LAST_BLOCK * FAKE_LAYOUT.bytes_per_block
    assert discarded == {(("transport", "faulty"),): both_attempts}
    assert lost.keys() == {(("outcome", "corrupt"),)}
    assert all(seconds > 0 for seconds in lost.values())
