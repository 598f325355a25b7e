"""Every metric of Baton: its name, unit, labels, buckets and help in one list.

Front counts its own in `FrontMetrics`. Workers, and the other Fronts, send snapshots; `render`
writes all of them with `worker` and `role` labels, so that one scrape of one Front is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from deployments.openai.answer import Usage
from kv_transfer.durations import HANDOFF_BOUNDS_S
from kv_transfer.selection import LinkReason
from workers.runner_choice import RunnerChoice

__all__ = [
    "METRICS",
    "FrontMetrics",
    "Metric",
    "RequestMetrics",
    "Sample",
    "WorkerSnapshot",
    "loop_sample",
    "render",
    "sample",
]

_HISTOGRAM_SUFFIXES = ("_bucket", "_count", "_sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; a counter's name ends in `_total`, and the unit stands before that."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Their values come from closed sets; `worker` and `role` are added to every metric."""
    buckets: tuple[float, ...] = ()

    @property
    def sample_labels(self) -> dict[str, tuple[str, ...]]:
        """The names of the metric's samples, and the labels of each."""
        if self.kind != "histogram":
            return {self.name: self.labels}
        labels = {self.name + suffix: self.labels for suffix in _HISTOGRAM_SUFFIXES}
        return {**labels, f"{self.name}_bucket": (*self.labels, "le")}


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", help=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name=name, kind="histogram", help=text, labels=labels, buckets=buckets)


_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_FRONT = (
    _counter(
        "baton_requests_total",
        "HTTP requests, by endpoint and by outcome: the class of the status, `disconnected` when "
        "the client left first, `stream_error` when a stream ended in an error event.",
        "endpoint",
        "outcome",
    ),
    _gauge("baton_requests_in_flight", "HTTP requests being answered now.", "endpoint"),
    _histogram("baton_ttft_seconds", "Arrival to first token.", _FIRST_TOKEN_S, "endpoint"),
    _histogram("baton_itl_seconds", "Gap between frames of tokens.", _GAP_S, "endpoint"),
    _histogram("baton_e2e_seconds", "Arrival to last token.", _REQUEST_S, "endpoint"),
    _counter("baton_prompt_tokens_total", "Prompt tokens of requests.", "endpoint"),
    _counter("baton_completion_tokens_total", "Output tokens sent to clients.", "endpoint"),
    _counter(
        "baton_lost_attempts_total",
        "Attempts to serve a sequence that Front gave up, to go on with another decode worker: the "
        "worker was lost, stopping, silent, or none had answered (unanswered).",
        "cause",
    ),
)
_PROCESSES = (
    _gauge(
        "baton_asyncio_tasks", "Tasks on the process's event loop, that of the scrape included."
    ),
)
_WORKERS = (
    _gauge(
        "baton_runner_info",
        "1 for the way in which the worker runs its model: llama_shaped (Baton's own decoder) or "
        "stock (transformers' modules); and why: verified_family (of the own decoder), "
        "other_family, own_differs (at load it did not compute what the stock modules do), "
        "own_failed (at load it raised something else).",
        "tier",
        "cause",
    ),
    _gauge(
        "baton_kv_blocks",
        "Blocks of the pool, by state: free, reserved, used, cached, quarantined; `total` is "
        "their sum.",
        "state",
    ),
    _gauge("baton_kv_block_size_tokens", "Tokens that a block holds."),
    _gauge("baton_sequences", "Live sequences, by status.", "status"),
    _gauge("baton_sequences_limit", "Sequences that may run at once."),
    _gauge("baton_queue_length", "Sequences in the ticket queue."),
    _gauge("baton_queue_limit", "Sequences that may wait in the ticket queue."),
    _counter("baton_sequences_ended_total", "Sequences that ended, by outcome.", "outcome"),
    _counter("baton_computed_prompt_tokens_total", "Prompt tokens whose KV was computed here."),
    _gauge(
        "baton_prompt_token_seconds",
        "What a prompt token adds to a step, lately; placement by cost goes by it.",
    ),
    _counter("baton_output_tokens_total", "Tokens sampled here, or published by a hand-off."),
    _counter(
        "baton_prefix_queried_tokens_total",
        "Prompt tokens of sequences that were looked up in the prefix cache here.",
    ),
    _counter("baton_prefix_hit_tokens_total", "Those of them whose KV was found."),
    _counter("baton_prefix_stored_blocks_total", "Blocks that the prefix cache took."),
    _counter("baton_prefix_evicted_blocks_total", "Blocks that the prefix cache gave up."),
    _counter("baton_steps_total", "Engine steps."),
    _counter("baton_failed_steps_total", "Engine steps that raised."),
    _counter("baton_step_seconds_total", "Time in engine steps."),
    _counter(
        "baton_prompts_placed_total",
        "Prompts by where they were computed: local, remote, or fallback (here, after a hand-off "
        "failed); and why: alone (no prefill pool), resting (it did not answer lately), short, "
        "cheaper (by cost), unmeasured (cost is not known yet), setting, failed.",
        "place",
        "reason",
    ),
    _counter("baton_handoff_failures_total", "Hand-off attempts given up, by error.", "error"),
    _gauge("baton_transfers_active", "Transfers going on now."),
    _counter("baton_transfers_total", "Ended transfers, by outcome.", "outcome"),
    _counter("baton_transfer_blocks_total", "Blocks handed over, by direction.", "direction"),
    _counter(
        "baton_transfer_bytes_total",
        "Bytes of them, by direction and transport.",
        "direction",
        "transport",
    ),
    _counter(
        "baton_transfer_discarded_bytes_total",
        "Bytes that had landed of transfers that failed, by transport.",
        "transport",
    ),
    _counter(
        "baton_transfer_lost_seconds_total",
        "Time that failed transfers took to their end, by outcome.",
        "outcome",
    ),
    _gauge(
        "baton_link_info",
        "1 for the transport that KV from a peer moves over, and why: "
        f"{', '.join(reason.value for reason in LinkReason)}.",
        "peer",
        "transport",
        "reason",
    ),
    _histogram(
        "baton_handoff_fetch_seconds",
        "Opening a session to VALID, the prompt's computation included.",
        HANDOFF_BOUNDS_S,
    ),
    _histogram(
        "baton_handoff_wait_seconds",
        "Last grant to VALID: what a hand-off adds after the prompt's last chunk.",
        HANDOFF_BOUNDS_S,
    ),
    _counter("baton_digests_checked_total", "Blocks that landed and were verified."),
    _counter("baton_confirms_total", "Answers to confirm, by verdict.", "verdict"),
    _gauge("baton_leases_active", "Leases that hold blocks now."),
    _counter("baton_leases_opened_total", "Leases given."),
    _counter("baton_leases_refused_total", "Leases and connections not accepted."),
    _counter(
        "baton_strangers_total",
        "Connections and calls of those who had not proved to know the deployment's secret: for KV "
        "and for a prompt on prefill workers, for tokens on decode workers, and on these and on "
        "Fronts for whatever else our processes ask each other.",
    ),
    _counter("baton_leases_ended_total", "Leases ended, by reason; `expired` is one.", "reason"),
    _counter("baton_lease_renewals_total", "Renewals of leases."),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {m.name: m for m in (*_FRONT, *_PROCESSES, *_WORKERS)}
)
"""All metrics, in the order in which `render` writes them."""

_FAMILY_OF_SAMPLE: Mapping[str, Metric] = MappingProxyType(
    {name: metric for metric in METRICS.values() for name in metric.sample_labels}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a metric in the list; another name or other labels raise ValueError."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    value: float

    def __post_init__(self) -> None:
        """Check against the list."""
        if self.name not in _FAMILY_OF_SAMPLE:
            raise ValueError(f"no metric has samples called {self.name}")
        wanted = _FAMILY_OF_SAMPLE[self.name].sample_labels[self.name]
        if sorted(dict(self.labels)) != sorted(wanted):
            raise ValueError(f"{self.name} has the labels {wanted}, not {self.labels}")


def sample(name: str, value: float, **labels: str) -> Sample:
    """A sample, with its labels as keywords."""
    return Sample(name=name, labels=tuple(labels.items()), value=value)


def loop_sample() -> Sample:
    """How many tasks the running event loop has; one that leaks with each request shows by it."""
    return sample("baton_asyncio_tasks", len(asyncio.all_tasks()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What one process shows in `/metrics`; a Front's has the role `front`."""

    worker_id: str
    role: str
    samples: tuple[Sample, ...]
    runner: RunnerChoice | None = None
    """How it runs the model, for `/v1/models`: words are no labels. A Front runs none."""


def render(
    front_snapshots: Iterable[WorkerSnapshot], worker_snapshots: Iterable[WorkerSnapshot]
) -> str:
    """The snapshots in Prometheus' text format, every sample with its worker and role."""
    registry = CollectorRegistry()
    registry.register(_Snapshots((*front_snapshots, *worker_snapshots)))
    return generate_latest(registry).decode()


class _Snapshots(Collector):
    """Snapshots as prometheus_client's own families."""

    def __init__(self, snapshots: Iterable[WorkerSnapshot]) -> None:
        self._families = {
            metric.name: MetricFamily(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for metric in METRICS.values()
        }
        for snapshot in snapshots:
            for item in snapshot.samples:
                family = self._families[_FAMILY_OF_SAMPLE[item.name].name]
                own = {"worker": snapshot.worker_id, "role": snapshot.role}
                family.add_sample(item.name, {**own, **dict(item.labels)}, item.value)

    def collect(self) -> Iterator[MetricFamily]:
        """Called by the registry."""
        return (family for family in self._families.values() if family.samples)


class FrontMetrics:
    """What one Front process counts."""

    def __init__(self, front_id: str, *, num_strangers: Callable[[], int] = lambda: 0) -> None:
        """`num_strangers` tells how many calls this process has refused as a stranger's."""
        self._front_id = front_id
        self._num_strangers = num_strangers
        self._registry = CollectorRegistry()
        self._requests = Counter(**self._arguments("baton_requests_total"))
        self._in_flight = Gauge(**self._arguments("baton_requests_in_flight"))
        self._ttft = self._make_histogram("baton_ttft_seconds")
        self._itl = self._make_histogram("baton_itl_seconds")
        self._e2e = self._make_histogram("baton_e2e_seconds")
        self._prompt_tokens = Counter(**self._arguments("baton_prompt_tokens_total"))
        self._completion_tokens = Counter(**self._arguments("baton_completion_tokens_total"))
        self._lost_attempts = Counter(**self._arguments("baton_lost_attempts_total"))
        self._observers: dict[str, RequestMetrics] = {}

    def attempt_lost(self, cause: str) -> None:
        """A decode worker is given up; its sequence goes on elsewhere."""
        self._lost_attempts.labels(cause).inc()

    def request_started(self, endpoint: str) -> None:
        """A request has arrived."""
        self._in_flight.labels(endpoint).inc()

    def request_ended(self, endpoint: str, outcome: str) -> None:
        """A request that had started is over."""
        self._in_flight.labels(endpoint).dec()
        self._requests.labels(endpoint, outcome).inc()

    def request_observer(self, endpoint: str) -> RequestMetrics:
        """Where the times and tokens of an endpoint's requests are counted."""
        # Made once for each endpoint: to look its five metrics up takes longer than to route.
        if endpoint not in self._observers:
            self._observers[endpoint] = self._make_observer(endpoint)
        return self._observers[endpoint]

    def _make_observer(self, endpoint: str) -> RequestMetrics:
        return RequestMetrics(
            ttft=self._ttft.labels(endpoint),
            itl=self._itl.labels(endpoint),
            e2e=self._e2e.labels(endpoint),
            prompt_tokens=self._prompt_tokens.labels(endpoint),
            completion_tokens=self._completion_tokens.labels(endpoint),
        )

    def snapshot(self) -> WorkerSnapshot:
        """Everything counted so far."""
        samples = tuple(
            Sample(name=item.name, labels=tuple(item.labels.items()), value=item.value)
            for family in self._registry.collect()
            for item in family.samples
            if item.name in _FAMILY_OF_SAMPLE  # the client adds the time of creation
        )
        strangers = sample("baton_strangers_total", self._num_strangers())
        return WorkerSnapshot(worker_id=self._front_id, role="front", samples=(*samples, strangers))

    def _make_histogram(self, name: str) -> Histogram:
        return Histogram(**self._arguments(name), buckets=METRICS[name].buckets)

    def _arguments(self, name: str) -> dict[str, Any]:
        metric = METRICS[name]
        return {
            "name": name,
            "documentation": metric.help,
            "labelnames": metric.labels,
            "registry": self._registry,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Counts requests, in the labels of their endpoint; knows nothing of the single one."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first output token."""
        self.ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """Between two frames of tokens of one choice."""
        self.itl.observe(seconds)

    def ended(self, seconds: float | None, usage: Usage) -> None:
        """The request is over; seconds from its arrival if all its choices finished."""
        if seconds is not None:
            self.e2e.observe(seconds)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.completion_tokens.inc(usage.completion_tokens)
