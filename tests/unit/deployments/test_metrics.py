"""The list of metrics, and what one scrape of one Front shows."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import (
    METRICS,
    FrontMetrics,
    Sample,
    WorkerSnapshot,
    render,
    sample,
)
from deployments.openai.answer import Usage


def parsed(text: str) -> dict:
    """Values by sample name and labels."""
    return {
        (item.name, frozenset(item.labels.items())): item.value
        for family in text_string_to_metric_families(text)
        for item in family.samples
    }


def labels(**named: str) -> frozenset:
    return frozenset(named.items())


def test_names_follow_the_conventions():
    for metric in METRICS.values():
        assert re.fullmatch(r"baton_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(metric.buckets)
        assert not {"worker", "role", "request_id"} & set(metric.labels)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("baton_nothing", {}),
        ("baton_kv_blocks", {}),
        ("baton_kv_blocks", {"status": "free"}),
        ("baton_kv_blocks", {"state": "free", "more": "x"}),
        ("baton_steps_total", {"state": "free"}),
        ("baton_ttft_seconds", {"endpoint": "completions"}),
        ("baton_ttft_seconds_bucket", {"endpoint": "completions"}),
    ],
)
def test_a_sample_that_is_not_in_the_list_is_refused(name, given):
    with pytest.raises(ValueError, match=name):
        sample(name, 1, **given)


def test_samples_travel_between_processes():
    snapshot = WorkerSnapshot(
        worker_id="decode-0", role="decode", samples=(sample("baton_steps_total", 3),)
    )
    sent = msgspec.msgpack.encode(snapshot)
    assert msgspec.msgpack.decode(sent, type=WorkerSnapshot) == snapshot
    assert snapshot.samples[0] == Sample(name="baton_steps_total", value=3)


def test_one_scrape_shows_every_worker_and_every_front():
    front = FrontMetrics("front-0")
    front.request_started("completions")
    front.request_ended("completions", "2xx")
    front.request_started("completions")
    other = FrontMetrics("front-1").snapshot()
    workers = [
        WorkerSnapshot(
            worker_id=f"decode-{number}",
            role="decode",
            samples=(
                sample("baton_kv_blocks", 10 + number, state="free"),
                sample("baton_steps_total", 5),
            ),
        )
        for number in range(2)
    ]
    values = parsed(render([front.snapshot()], [other, *workers]))
    own = {"worker": "front-0", "role": "front", "endpoint": "completions"}
    assert values["baton_requests_total", labels(**own, outcome="2xx")] == 1
    assert values["baton_requests_in_flight", labels(**own)] == 1
    for number in range(2):
        own = {"worker": f"decode-{number}", "role": "decode"}
        assert values["baton_kv_blocks", labels(**own, state="free")] == 10 + number
        assert values["baton_steps_total", labels(**own)] == 5


def test_each_family_is_described_once():
    snapshots = [FrontMetrics(f"front-{number}") for number in range(3)]
    for front in snapshots:
        front.request_observer("completions").first_token(0.3)
    text = render((front.snapshot() for front in snapshots), ())
    types = re.findall(r"^# TYPE (\S+)", text, flags=re.MULTILINE)
    assert len(types) == len(set(types))
    assert "# TYPE baton_ttft_seconds histogram" in text
    assert "_created" not in text


def test_a_front_shows_the_calls_that_it_has_refused():
    numbers = iter([0, 2])
    front = FrontMetrics("front-0", num_strangers=lambda: next(numbers))
    own = labels(worker="front-0", role="front")
    for expected in (0, 2):
        assert parsed(render([front.snapshot()], ()))["baton_strangers_total", own] == expected


def test_a_requests_times_and_tokens_are_counted():
    front = FrontMetrics("front-0")
    observer = front.request_observer("chat_completions")
    observer.first_token(0.3)
    observer.token_gap(0.002)
    observer.ended(1.5, Usage(prompt_tokens=7, completion_tokens=3))
    observer.ended(None, Usage(prompt_tokens=1, completion_tokens=1))
    values = parsed(render([front.snapshot()], ()))
    own = {"worker": "front-0", "role": "front", "endpoint": "chat_completions"}
    assert values["baton_prompt_tokens_total", labels(**own)] == 8
    assert values["baton_completion_tokens_total", labels(**own)] == 4
    assert values["baton_e2e_seconds_count", labels(**own)] == 1
    assert values["baton_e2e_seconds_sum", labels(**own)] == 1.5
    assert values["baton_ttft_seconds_bucket", labels(**own, le="0.25")] == 0
    assert values["baton_ttft_seconds_bucket", labels(**own, le="0.5")] == 1
    assert values["baton_itl_seconds_bucket", labels(**own, le="0.0025")] == 1
    assert not any(math.isnan(value) for value in values.values())
