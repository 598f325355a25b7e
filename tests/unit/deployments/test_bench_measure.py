from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.bench.errors import BenchInputError
from deployments.bench.interference import (
    Interference,
    InterferenceSummary,
    Phase,
    measure_phase,
)
from deployments.bench.measure import (
    Distribution,
    Failure,
    Sample,
    Target,
    parse_target,
    quantile,
    summarize,
)
from deployments.bench.versus import compare, turns
from deployments.bench.workload import Lengths


def sample(index: int = 0, sent_s: float = 0.0, **more: object) -> Sample:
    """Text at 1, 1.5 and 3 s after sending."""
    values = {
        "text_s": tuple(sent_s + after for after in (1.0, 1.5, 3.0)),
        "ended_s": sent_s + 3.1,
        "prompt_tokens": 10,
        "output_tokens": 5,
        **more,
    }
    return Sample(index=index, sent_s=sent_s, **values)  # type: ignore[arg-type]  # each by its name


FAILED = sample(text_s=(), failure=Failure(kind="http 429", message="full"))


def test_times_are_counted_from_sending() -> None:
    seen = sample(sent_s=7.0)

    assert (seen.ttft_s, seen.e2e_s, seen.gaps_s) == (1.0, 3.0, (0.5, 1.5))


def test_tpot_counts_tokens_where_chunks_hold_several() -> None:
    assert sample(output_tokens=5).tpot_s == pytest.approx(2.0 / 4)
    assert sample(output_tokens=None).tpot_s == pytest.approx(2.0 / 2)


@pytest.mark.parametrize(("text_s", "tokens"), [((1.0,), 5), ((1.0, 2.0), 1)])
def test_one_chunk_or_one_token_has_no_tpot(text_s: tuple[float, ...], tokens: int) -> None:
    assert sample(text_s=text_s, output_tokens=tokens).tpot_s is None


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=50))
def test_quantiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")

    ordered = sorted(values)

    for share, value in zip(range(1, 100), expected, strict=True):
        assert quantile(ordered, share / 100) == pytest.approx(value, abs=1e-6)


def test_a_distribution_of_nothing_is_none() -> None:
    assert Distribution.of([]) is None
    assert Distribution.of([2.0]) == Distribution(n=1, mean=2, p50=2, p90=2, p99=2, max=2)


def test_summary_counts_only_what_finished() -> None:
    summary = summarize([sample(0), FAILED, sample(1, 1.0, late_s=0.2)], wall_s=4.0)

    assert (summary.num_sent, summary.num_finished) == (3, 2)
    assert (summary.failures, summary.first_failure) == ({"http 429": 1}, "full")
    assert summary.output_tokens_per_s == pytest.approx(10 / 4)
    assert summary.total_tokens_per_s == pytest.approx(30 / 4)
    assert summary.requests_per_s == pytest.approx(0.5)
    assert summary.tokens_per_chunk == pytest.approx(10 / 6)
    assert summary.ttft is not None
    assert summary.ttft.n == 2
    assert summary.itl is not None
    assert (summary.itl.n, summary.itl.max) == (4, 1.5)
    assert summary.late_max_s == 0.2
    assert summary.goodput is None
    assert summary.cached_tokens_mean is None


def test_total_tokens_are_unknown_unless_every_prompt_was_counted() -> None:
    summary = summarize([sample(), sample(prompt_tokens=None)], wall_s=1.0)

    assert summary.total_tokens_per_s is None
    assert "total_tokens_per_s" not in summary.figures()


def test_nothing_finished_has_no_latency_figures() -> None:
    summary = summarize([FAILED], wall_s=1.0, targets=[parse_target("ttft:1")])

    assert summary.figures() == {
        "output_tokens_per_s": 0,
        "total_tokens_per_s": 0,
        "requests_per_s": 0,
        "goodput_per_s": 0,
        "good_share": 0,
    }
    assert summarize([], wall_s=1.0, targets=[parse_target("ttft:1")]).goodput is not None


def test_figures_carry_their_unit_in_the_name() -> None:
    figures = summarize([sample(cached_tokens=4)], wall_s=2.0).figures()

    assert figures["ttft_p50_s"] == 1.0
    assert figures["e2e_max_s"] == 3.0
    assert figures["total_tokens_per_s"] == pytest.approx(7.5)


@pytest.mark.parametrize(
    ("target", "is_good"),
    [
        ("ttft:1000", True),
        ("ttft:999", False),
        ("itl:1500", True),
        ("itl:1499", False),
        ("tpot:500", True),
        ("tpot:499", False),
        ("e2e:3000", True),
        ("e2e:2999", False),
    ],
)
def test_goodput_holds_each_request_to_its_target(target: str, is_good: bool) -> None:
    summary = summarize([sample(), FAILED], wall_s=2.0, targets=[parse_target(target)])

    assert summary.goodput is not None
    assert summary.goodput.requests_per_s == (0.5 if is_good else 0)
    assert summary.goodput.share == (0.5 if is_good else 0)


def test_a_good_request_meets_all_targets() -> None:
    targets = [parse_target("ttft:1000"), parse_target("e2e:2999")]

    summary = summarize([sample()], wall_s=1.0, targets=targets)

    assert summary.goodput is not None
    assert summary.goodput.share == 0


@pytest.mark.parametrize("metric", ["itl", "tpot"])
def test_one_token_meets_every_target_on_gaps(metric: str) -> None:
    assert Target(metric=metric, limit_s=0.001).is_met_by(sample(text_s=(1.0,), output_tokens=1))


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "speed:3", ""])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BenchInputError, match="ttft:500"):
        parse_target(text)


INTERFERENCE = Interference(
    streams=2,
    steady=Lengths(prompt_tokens=3, output_tokens=4),
    long=Lengths(prompt_tokens=1500, output_tokens=4),
    period_s=4.0,
    duration_s=12.0,
)


def test_long_prompts_come_after_each_period_and_not_at_the_end() -> None:
    load = INTERFERENCE.long_prompts()

    assert [request.due_s for request in load.requests] == [4.0, 8.0]
    assert {request.prompt_tokens for request in load.requests} == {1500}
    assert load.concurrency is None


def test_steady_requests_never_end() -> None:
    some = list(itertools.islice(INTERFERENCE.steady_requests(), 100))

    assert [request.index for request in some] == list(range(100))
    assert "2 streams" in INTERFERENCE.label
    assert "1500" in INTERFERENCE.label


def test_a_phase_counts_tokens_in_its_window_and_gaps_that_began_there() -> None:
    # Two tokens a chunk, at 1, 2 and 9 s; the window ends at 5 s.
    seen = sample(text_s=(1.0, 2.0, 9.0, 9.5), output_tokens=8)

    phase = measure_phase([seen, FAILED], [sample()], started_s=0.0, duration_s=5.0)

    assert phase.tokens_per_s == pytest.approx(4 / 5)
    assert phase.longest_gaps_s == (7.0, 1.0)
    assert phase.gaps is not None
    assert phase.gaps.n == 2
    assert phase.failures == {"http 429": 1}
    assert phase.num_long_sent == 1
    assert phase.long_ttft is not None
    assert phase.long_ttft.p50 == 1.0


def quiet(tokens_per_s: float, **more: object) -> Phase:
    values = {
        "gaps": None,
        "longest_gaps_s": (),
        "ttft": None,
        "num_long_sent": 0,
        "long_ttft": None,
        "failures": {},
        "first_failure": None,
        **more,
    }
    return Phase(tokens_per_s=tokens_per_s, **values)  # type: ignore[arg-type]  # each by its name


def test_kept_is_the_rate_beside_over_the_rate_alone() -> None:
    spread = Distribution.of([0.5])
    both = InterferenceSummary(
        alone=quiet(100.0), beside=quiet(75.0, gaps=spread, ttft=spread, long_ttft=spread)
    )

    figures = both.figures()

    assert figures["kept_share"] == 0.75
    assert figures["beside_itl_max_s"] == 0.5
    assert figures["beside_ttft_max_s"] == 0.5
    assert figures["long_ttft_p50_s"] == 0.5
    assert "alone_itl_max_s" not in figures


def test_nothing_is_kept_of_nothing() -> None:
    both = InterferenceSummary(alone=quiet(0.0), beside=quiet(0.0))

    assert both.kept_share is None
    assert "kept_share" not in both.figures()


def test_each_server_goes_first_as_often_as_second() -> None:
    order = [side for _, pair in turns(4) for side in pair]

    assert "".join(order) == "ABBAABBA"


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine was twice as slow in round two, for both: the ratio does not move.
    rounds = [({"ttft_s": 1.0}, {"ttft_s": 2.0}), ({"ttft_s": 2.0}, {"ttft_s": 4.0})]

    [found] = compare(rounds)

    assert (found.a_median, found.b_median, found.n) == (1.5, 3.0, 2)
    assert found.ratio_median == 0.5
    assert found.ratio_quartiles == found.ratio_range == (0.5, 0.5)


def test_the_spread_of_ratios_is_told() -> None:
    rounds = [({"x": value}, {"x": 1.0}) for value in (1.0, 2.0, 3.0, 4.0, 5.0)]

    [found] = compare(rounds)

    assert (found.ratio_median, found.ratio_quartiles, found.ratio_range) == (3, (2, 4), (1, 5))


def test_a_figure_that_one_lacks_is_left_out_of_that_round() -> None:
    rounds = [
        ({"x": 1.0, "y": 1.0, "z": 1.0}, {"x": 2.0, "z": 0.0}),
        ({"y": 1.0}, {"x": 2.0, "y": 4.0}),
    ]

    found = {one.name: one for one in compare(rounds)}

    assert found.keys() == {"x", "y"}
    assert (found["y"].ratio_median, found["y"].n) == (0.25, 1)
    assert compare([]) == []
