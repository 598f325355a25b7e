from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deployments.bench.cpu import CpuUse
from deployments.bench.interference import InterferenceSummary, measure_phase
from deployments.bench.measure import Failure, Sample, parse_target, summarize
from deployments.bench.report import (
    point_as_text,
    report_as_json,
    servers_as_text,
    versus_as_text,
)
from deployments.bench.session import PointResult, Report, ServerInfo, VersusResult
from deployments.bench.versus import compare

IDLE = CpuUse(own_cores=0.01, servers_cores={"A": 1.5}, other_cores=0.02)
UNKNOWN = CpuUse(own_cores=0.01, servers_cores={"A": None}, other_cores=None)


def sample(index: int, ttft_s: float = 0.25, **more: object) -> Sample:
    values = {
        "text_s": (ttft_s, ttft_s + 0.05, ttft_s + 0.15),
        "ended_s": ttft_s + 0.15,
        "prompt_tokens": 100,
        "output_tokens": 3,
        **more,
    }
    return Sample(index=index, sent_s=0.0, **values)  # type: ignore[arg-type]  # each by its name


FAILED = sample(1, text_s=(), failure=Failure(kind="http 503", message="no worker"))


def point(
    *samples: Sample, cpu: CpuUse = IDLE, targets: tuple[str, ...] = (), num_cut: int = 0
) -> PointResult:
    return PointResult(
        server="A",
        label="concurrency 2",
        run="point 0",
        summary=summarize(samples, wall_s=2.0, targets=[parse_target(text) for text in targets]),
        cpu=cpu,
        samples=samples,
        num_cut=num_cut,
    )


def interference(*, is_answered: bool = True) -> PointResult:
    steady = [sample(0)] if is_answered else [FAILED]
    long = [sample(0, 1.0)] if is_answered else [FAILED]
    alone = measure_phase(steady, [], started_s=0.0, duration_s=1.0)
    beside = measure_phase(steady, long, started_s=0.0, duration_s=1.5)
    summary = InterferenceSummary(alone=alone, beside=beside)
    return replace(point(), label="4 streams", summary=summary, samples=())


def row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()[1:]


def test_latencies_are_in_milliseconds_with_their_number() -> None:
    text = point_as_text(point(sample(0), sample(1, 0.35)))

    assert row(text, "TTFT") == ["300.0", "340.0", "349.0", "350.0", "2"]
    assert row(text, "ITL") == ["75.0", "100.0", "100.0", "100.0", "4"]
    assert "2 of 2 requests in 2.0 s; tokens on average: prompt 100.0, output 3.0" in text
    assert "output 3.0 tokens/s, total 103.0 tokens/s, 1.00 requests/s" in text
    assert "FAILED" not in text
    assert "goodput" not in text


def test_few_requests_are_said_to_have_no_p99() -> None:
    caution = "a p99 of TTFT, TPOT or E2E is about the maximum"

    assert caution in point_as_text(point(sample(0)))
    assert caution not in point_as_text(point(*(sample(index) for index in range(100))))


def test_failures_are_counted_by_kind_with_the_first_reason() -> None:
    text = point_as_text(point(sample(0), FAILED, FAILED))

    assert "1 of 3 requests" in text
    assert "FAILED: 2 http 503; the first: no worker" in text


def test_nothing_finished_is_a_table_of_dashes() -> None:
    text = point_as_text(point(FAILED))

    assert row(text, "TTFT") == ["-", "-", "-", "-", "0"]
    assert "tokens on average" not in text


def test_goodput_names_its_targets() -> None:
    text = point_as_text(point(sample(0), FAILED, targets=("ttft:500", "itl:100.5")))

    assert "goodput 0.50 requests/s, 50.0 % of those sent (ttft <= 500 ms, itl <= 100.5 ms)" in text


def test_what_makes_figures_doubtful_is_said() -> None:
    text = point_as_text(point(sample(0, output_tokens=6, late_s=0.3), num_cut=7, cpu=UNKNOWN))

    assert "2.00 tokens in a chunk" in text
    assert "the client itself was up to 300.0 ms late" in text
    assert "lengths of 7 requests were cut" in text
    assert "cores used: A not known, this client 0.01; else not known" in text


def test_unknown_prompt_lengths_have_no_total() -> None:
    assert "total" not in point_as_text(point(sample(0, prompt_tokens=None)))


def test_the_use_of_cores_is_told() -> None:
    assert "cores used: A 1.50, this client 0.01; else 0.02" in point_as_text(point(sample(0)))


def test_interference_shows_what_was_kept_and_the_longest_gaps() -> None:
    text = point_as_text(interference())

    assert "rate kept: 66.7 %" in text
    assert row(text, "alone")[:5] == ["3.0", "75.0", "99.5", "100.0", "100.0"]
    assert "1 long prompts: TTFT p50 1000.0, max 1000.0 ms" in text


def test_interference_without_an_answer_says_so() -> None:
    text = point_as_text(interference(is_answered=False))

    assert "rate kept: not known" in text
    assert "none answered" in text
    assert text.count("FAILED") == 2


def versus(*rounds: tuple[PointResult, PointResult], num_cut: int = 0) -> VersusResult:
    figures = [(a.summary.figures(), b.summary.figures()) for a, b in rounds]
    return VersusResult(
        label="concurrency 2",
        rounds=rounds,
        comparisons=tuple(compare(figures)),
        num_rounds_cut=num_cut,
    )


def test_two_servers_stand_side_by_side_with_their_ratio() -> None:
    pair = (point(sample(0), targets=("ttft:500",)), point(sample(0, 0.5), targets=("ttft:500",)))

    text = versus_as_text(versus(pair, pair))

    [line] = [line for line in text.splitlines() if "TTFT p50, ms" in line]
    assert line.split()[3:] == [
        *("250.0", "500.0", "0.500"),
        *("0.500", "-", "0.500"),
        *("0.500", "-", "0.500"),
        "2",
    ]
    assert "output tokens/s  1.50" in text
    assert "good, %" in text
    assert "cores used by anything else: 0.02 - 0.02" in text
    assert "cores used by this client: at most 0.01" in text
    assert "left out" not in text
    assert "failed" not in text


def test_rounds_left_out_failures_and_unknown_use_are_told() -> None:
    pair = (point(sample(0), FAILED, cpu=UNKNOWN), point(sample(0), cpu=UNKNOWN))

    text = versus_as_text(versus(pair, num_cut=2))

    assert "2 rounds left out" in text
    assert "1 requests failed" in text
    assert "anything else: not known" in text


def test_interference_of_two_servers_is_compared_too() -> None:
    text = versus_as_text(versus((interference(), interference(is_answered=False))))

    assert "2 requests failed" not in text
    assert "3 requests failed" in text


def test_no_round_is_a_table_without_rows() -> None:
    text = versus_as_text(versus(num_cut=4))

    assert "4 rounds left out" in text
    assert "cores" not in text


@pytest.fixture
def report() -> Report:
    info = ServerInfo(name="A", address="http://server", model="tiny")
    return Report(
        options={"seed": 5}, seed=5, servers=(info,), host={"cores": 2}, skipped=["rate 9/s"]
    )


def test_the_header_names_servers_and_the_seed(report: Report) -> None:
    assert servers_as_text(report) == "A  http://server  tiny\nseed 5"


def test_json_has_everything_in_base_units(report: Report) -> None:
    pair = (point(sample(0)), point(sample(0)))
    report.points += [point(sample(0), FAILED), interference()]
    report.versus.append(versus(pair))

    found = json.loads(json.dumps(report_as_json(report)))

    first, second = found["points"]
    assert first["figures"]["ttft_p50_s"] == 0.25
    assert first["summary"]["failures"] == {"http 503": 1}
    assert first["cpu"]["other_cores"] == 0.02
    assert first["requests"][0]["e2e_s"] == 0.4
    assert first["requests"][1] == {
        "index": 1,
        "prompt_tokens": 100,
        "output_tokens": 3,
        "ttft_s": None,
        "e2e_s": None,
        "itl_max_s": None,
        "failure": "http 503",
    }
    assert second["figures"]["kept_share"] == pytest.approx(2 / 3)
    assert found["versus"][0]["comparisons"][0]["ratio_median"] == 1.0
    assert len(found["versus"][0]["rounds"]) == 1
    assert found["skipped"] == ["rate 9/s"]
    assert found["seed"] == 5
