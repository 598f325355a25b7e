"""Loads as they are driven, on servers that answer in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from deployments.bench.client import RequestStyle, StreamingClient
from deployments.bench.drive import SystemClock, drive
from deployments.bench.errors import NothingMeasuredError
from deployments.bench.interference import Interference, InterferenceSummary
from deployments.bench.measure import Failure, Sample, Summary
from deployments.bench.plan import BenchOptions, Plan, make_plan
from deployments.bench.session import Report, ServerInfo, Session
from deployments.bench.versus import Side
from deployments.bench.workload import Lengths, Load, PlannedRequest, closed_load
from tests.fakes.bench import (
    DONE,
    IdleMachine,
    RecordingObserver,
    ScriptedStream,
    VirtualClock,
    text_event,
    usage_event,
)

LENGTHS = Lengths(prompt_tokens=4, output_tokens=3)
FOREVER_S = 1e9


@dataclass
class SlowServer:
    """First text after ttft_s, then one every itl_s, whatever else it is asked."""

    clock: VirtualClock
    name: str = "A"
    ttft_s: float = 1.0
    itl_s: float = 0.5
    status: int = 200
    log: list[tuple[str, float, str]] = field(default_factory=list)

    def respond(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content)
        self.log.append((self.name, self.clock.now(), body["prompt"]))
        if self.status != 200:
            return httpx.Response(self.status, stream=ScriptedStream(self.clock, [(0.1, b"no")]))
        count = body["max_tokens"]
        parts = [(self.ttft_s + i * self.itl_s, text_event("x")) for i in range(count)]
        end = text_event("", "length") + usage_event(len(body["prompt"].split()), count) + DONE
        return httpx.Response(200, stream=ScriptedStream(self.clock, [*parts, (0.0, end)]))

    def client(self) -> StreamingClient:
        http = httpx.AsyncClient(
            base_url="http://server/v1/", transport=httpx.MockTransport(self.respond)
        )
        return StreamingClient(http, "tiny", RequestStyle(), self.clock.now)


def options(**more: Any) -> BenchOptions:
    return BenchOptions(**{"lengths": LENGTHS, "seed": 1, "num_requests": 6, **more})


def new_report() -> Report:
    info = ServerInfo(name="A", address="http://server", model="tiny")
    return Report(options={}, seed=1, servers=(info,), host={})


async def measure(
    chosen: BenchOptions, servers: Mapping[Side, SlowServer], plan: Plan | None = None
) -> tuple[Report, RecordingObserver]:
    clock = servers["A"].clock
    observer, report = RecordingObserver(), new_report()
    session = Session(
        chosen,
        plan or make_plan(chosen, {}),
        {side: server.client() for side, server in servers.items()},
        clock=clock,
        cpu=IdleMachine(clock),
        observer=observer,
    )
    await clock.run(session.run(report))
    return report, observer


async def drive_recording(
    load: Load, clock: VirtualClock, *, takes_s: float, deadline_s: float = FOREVER_S
) -> tuple[list[Sample], list[tuple[int, float]], int]:
    sent: list[tuple[int, float]] = []
    in_flight, most = 0, 0

    async def send(request: PlannedRequest, due_s: float) -> Sample:
        nonlocal in_flight, most
        sent.append((request.index, clock.now()))
        in_flight += 1
        most = max(most, in_flight)
        # The first takes longest, so that they do not end in order.
        await clock.sleep_until(clock.now() + takes_s + (3.0 if request.index == 0 else 0.0))
        in_flight -= 1
        return Sample(index=request.index, sent_s=due_s, ended_s=clock.now(), text_s=(due_s,))

    samples = await clock.run(drive(load, send, clock, deadline_s=deadline_s))
    return samples, sent, most


async def test_a_closed_loop_keeps_its_places_full_and_never_more() -> None:
    load = closed_load(3, num_requests=9, lengths=LENGTHS)

    samples, sent, most = await drive_recording(load, VirtualClock(), takes_s=1.0)

    assert most == 3
    assert [sample.index for sample in samples] == list(range(9))
    assert [moment for _, moment in sent] == [0, 0, 0, 1, 1, 2, 2, 3, 3]


async def test_an_open_loop_sends_when_due_whatever_is_in_flight() -> None:
    requests = tuple(
        PlannedRequest(index=i, due_s=i * 0.5, prompt_tokens=1, output_tokens=1) for i in range(6)
    )
    load = Load(label="open", requests=requests, concurrency=None)

    samples, sent, most = await drive_recording(load, VirtualClock(), takes_s=100.0)

    assert sent == [(i, i * 0.5) for i in range(6)]
    assert most == 6
    assert len(samples) == 6


@pytest.mark.parametrize("concurrency", [1, None])
async def test_nothing_is_sent_from_the_deadline_on(concurrency: int | None) -> None:
    requests = tuple(
        PlannedRequest(index=i, due_s=i * 2.0, prompt_tokens=1, output_tokens=1)
        for i in range(1, 9)
    )
    load = Load(label="load", requests=requests, concurrency=concurrency)

    samples, sent, _ = await drive_recording(load, VirtualClock(), takes_s=2.0, deadline_s=6.0)

    assert len(samples) == len(sent)
    assert all(moment < 6.0 for _, moment in sent)
    assert [sample.index for sample in samples] == ([1, 2] if concurrency is None else [1, 2, 3])


async def test_the_system_clock_waits_for_moments_of_its_own_time() -> None:
    times = iter([5.0, 5.0])
    clock = SystemClock(lambda: next(times))

    await asyncio.wait_for(clock.sleep_until(4.0), 5)

    assert clock.now() == 5.0


async def test_a_closed_load_is_measured_without_its_warm_up() -> None:
    server = SlowServer(VirtualClock())

    report, observer = await measure(options(concurrencies=(2,), warmup=2), {"A": server})

    [point] = report.points
    assert isinstance(point.summary, Summary)
    assert point.summary.num_finished == 6
    assert point.summary.wall_s == pytest.approx(3 * 2.0)
    assert point.summary.output_tokens_per_s == pytest.approx(18 / 6.0)
    assert point.summary.ttft is not None
    assert point.summary.ttft.max == pytest.approx(1.0)
    assert point.summary.prompt_tokens_mean == 4
    assert len(server.log) == 8
    assert len({prompt for *_, prompt in server.log}) == 8
    assert observer.begun == [("A concurrency 2", 6)]
    assert observer.points == report.points
    assert observer.num_ended_loads == 1


async def test_a_rate_sends_at_its_moments() -> None:
    server = SlowServer(VirtualClock(), ttft_s=50.0)

    report, _ = await measure(options(rates=(2.0, 4.0), warmup=0), {"A": server})

    assert [point.label for point in report.points] == ["rate 2/s", "rate 4/s"]
    moments = [moment for _, moment, _ in server.log][:6]
    assert moments == sorted(moments)
    assert 0 < moments[-1] < 50.0


async def test_two_servers_are_measured_in_turns_and_compared() -> None:
    clock = VirtualClock()
    log: list[tuple[str, float, str]] = []
    fast = SlowServer(clock, "A", ttft_s=1.0, log=log)
    slow = SlowServer(clock, "B", ttft_s=4.0, log=log)
    chosen = options(concurrencies=(2,), num_requests=2, rounds=4, warmup=1)

    report, observer = await measure(chosen, {"A": fast, "B": slow})

    [result] = report.versus
    assert "".join(name for name, *_ in log) == "AB" + "AABB" + "BBAA" + "AABB" + "BBAA"
    assert len({prompt for *_, prompt in log}) == len(log)
    found = {one.name: one for one in result.comparisons}
    assert found["ttft_p50_s"].ratio_median == pytest.approx(0.25)
    assert found["ttft_p50_s"].n == 4
    assert found["itl_p50_s"].ratio_median == pytest.approx(1.0)
    assert result.num_rounds_cut == 0
    assert all(a.server == "A" and b.server == "B" for a, b in result.rounds)
    assert observer.versus == report.versus
    assert report.points == []


async def test_a_round_that_the_time_cut_is_left_out() -> None:
    clock = VirtualClock()
    servers: dict[Side, SlowServer] = {"A": SlowServer(clock), "B": SlowServer(clock, "B")}
    chosen = options(concurrencies=(1,), num_requests=2, rounds=4, warmup=0, max_seconds=9.0)

    report, _ = await measure(chosen, servers)

    [result] = report.versus
    assert len(result.rounds) == 1
    assert result.num_rounds_cut == 3


async def test_a_load_without_time_is_skipped_and_named() -> None:
    server = SlowServer(VirtualClock())
    chosen = options(concurrencies=(1, 2), warmup=0, max_seconds=11.0)

    report, observer = await measure(chosen, {"A": server})

    assert [point.label for point in report.points] == ["concurrency 1"]
    assert report.skipped == observer.labels_skipped == ["concurrency 2"]


def interference(duration_s: float = 12.0) -> Interference:
    return Interference(
        streams=2,
        steady=LENGTHS,
        long=Lengths(prompt_tokens=40, output_tokens=1),
        period_s=4.0,
        duration_s=duration_s,
    )


async def test_streams_are_measured_alone_and_beside_long_prompts() -> None:
    server = SlowServer(VirtualClock())

    report, observer = await measure(options(interference=interference()), {"A": server})

    [point] = report.points
    assert isinstance(point.summary, InterferenceSummary)
    # Two streams of three tokens in two seconds each, whatever else is sent to this server.
    assert point.summary.alone.tokens_per_s == pytest.approx(3.0)
    assert point.summary.kept_share == pytest.approx(1.0)
    assert (point.summary.alone.num_long_sent, point.summary.beside.num_long_sent) == (0, 2)
    assert sum(len(prompt.split()) == 40 for *_, prompt in server.log) == 2
    assert observer.begun == [("A 2 streams, a prompt of 40 every 4 s", None)]


async def test_interference_needs_time_for_both_phases() -> None:
    server = SlowServer(VirtualClock())
    chosen = options(interference=interference(), warmup=0, max_seconds=23.0)

    with pytest.raises(NothingMeasuredError):
        await measure(chosen, {"A": server})

    assert server.log == []


async def test_a_warm_up_that_fails_ends_it_with_the_reason() -> None:
    server = SlowServer(VirtualClock(), status=404)

    with pytest.raises(NothingMeasuredError, match="http 404"):
        await measure(options(concurrencies=(1,)), {"A": server})

    assert len(server.log) == 1


async def test_no_answer_at_all_is_an_error_after_the_report() -> None:
    server = SlowServer(VirtualClock(), status=503)
    observer = RecordingObserver()
    chosen = options(concurrencies=(1,), warmup=0)
    session = Session(
        chosen,
        make_plan(chosen, {}),
        {"A": server.client()},
        clock=server.clock,
        cpu=IdleMachine(server.clock),
        observer=observer,
    )

    with pytest.raises(NothingMeasuredError, match="No request finished"):
        await server.clock.run(session.run(new_report()))

    [point] = observer.points
    assert isinstance(point.summary, Summary)
    assert point.summary.failures == {"http 503": 6}


class TimingOutClient(StreamingClient):
    """Every request takes the whole of its time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.timeouts_s: list[float] = []

    async def ask(
        self, prompt: str, output_tokens: int, *, index: int, due_s: float, timeout_s: float
    ) -> Sample:
        self.timeouts_s.append(timeout_s)
        await self.clock.sleep_until(due_s + timeout_s)
        failure = Failure(kind="timeout", message="too long")
        return Sample(index=index, sent_s=due_s, ended_s=self.clock.now(), failure=failure)


async def test_what_our_own_deadline_ends_is_unfinished_and_no_timeout() -> None:
    clock = VirtualClock()
    client = TimingOutClient(clock)
    chosen = options(concurrencies=(1,), warmup=0, timeout_s=10.0, max_seconds=25.0)
    observer = RecordingObserver()
    session = Session(
        chosen,
        make_plan(chosen, {}),
        {"A": client},
        clock=clock,
        cpu=IdleMachine(clock),
        observer=observer,
    )

    with pytest.raises(NothingMeasuredError):
        await clock.run(session.run(new_report()))

    assert client.timeouts_s == [10.0, 10.0, 5.0]
    assert clock.now() == 25.0
    [point] = observer.points
    assert isinstance(point.summary, Summary)
    assert point.summary.failures == {"timeout": 2, "unfinished": 1}
