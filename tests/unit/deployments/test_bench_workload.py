from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.bench.errors import BenchInputError
from deployments.bench.prompts import BlockPrompts, ListedPrompts, WordPrompts, parse_prompts
from deployments.bench.traces import BLOCK_TOKENS, TraceRow, parse_trace
from deployments.bench.workload import (
    Lengths,
    PlannedRequest,
    closed_load,
    poisson_load,
    trace_load,
)

LENGTHS = Lengths(prompt_tokens=20, output_tokens=5)
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,0
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}
{"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
"""


def planned(
    index: int = 0, prompt_tokens: int = 20, block_ids: tuple[int, ...] = ()
) -> PlannedRequest:
    return PlannedRequest(
        index=index, prompt_tokens=prompt_tokens, output_tokens=5, block_ids=block_ids
    )


@pytest.mark.parametrize(("asked", "expected"), [(3, 4), (10, 10)])
def test_closed_load_has_a_request_for_every_place(asked: int, expected: int) -> None:
    load = closed_load(4, num_requests=asked, lengths=LENGTHS)

    assert [request.index for request in load.requests] == list(range(expected))
    assert load.concurrency == 4
    assert {(r.prompt_tokens, r.output_tokens) for r in load.requests} == {(20, 5)}


@settings(max_examples=25)
@given(rate=st.floats(0.01, 100), seed=st.integers())
def test_poisson_arrivals_come_at_the_rate(rate: float, seed: int) -> None:
    load = poisson_load(rate, num_requests=2000, lengths=LENGTHS, rng=random.Random(seed))

    gaps = [b.due_s - a.due_s for a, b in itertools.pairwise(load.requests)]
    assert load.concurrency is None
    assert load.requests[0].due_s == 0
    assert min(gaps) >= 0
    # The mean of 1999 exponential gaps is within 15 % but once in 10^11 draws.
    assert sum(gaps) / len(gaps) * rate == pytest.approx(1, rel=0.15)
    # As spread as the mean is large, which even arrivals are not.
    spread = (sum((g * rate) ** 2 for g in gaps) / len(gaps)) - (sum(gaps) * rate / len(gaps)) ** 2
    assert 0.5 < spread < 2


def test_poisson_arrivals_repeat_with_the_seed() -> None:
    loads = [
        poisson_load(2, num_requests=9, lengths=LENGTHS, rng=random.Random(seed))
        for seed in (1, 1, 2)
    ]

    assert loads[0] == loads[1] != loads[2]


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(BenchInputError, match="above 0"):
        poisson_load(rate, num_requests=1, lengths=LENGTHS, rng=random.Random(0))


def test_azure_rows_have_their_distance_in_time() -> None:
    first, second = parse_trace("a.csv", AZURE.splitlines(keepends=True))

    assert (first.prompt_tokens, first.output_tokens, first.block_ids) == (4808, 10, ())
    assert second.at_s - first.at_s == pytest.approx(1.5)
    assert second.output_tokens == 1


def test_mooncake_rows_come_in_order_of_arrival_with_their_blocks() -> None:
    first, second = parse_trace("m.jsonl", MOONCAKE.splitlines(keepends=True))

    assert (first.at_s, first.prompt_tokens, first.block_ids) == (1, 600, (0, 1))
    assert (second.at_s, second.output_tokens) == (3, 9)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AZURE + "yesterday,1,2\n", 4),
        (AZURE + "2023-11-16 18:17:05,x,2\n", 4),
        (AZURE + "2023-11-16 18:17:05\n", 4),
        ("TIMESTAMP,Other\n2023-11-16 18:17:05,3\n", 2),
        (MOONCAKE + "{}\n", 3),
        (MOONCAKE + "[]\n", 3),
        (MOONCAKE + "not JSON\n", 3),
        ("7\n", 1),
    ],
)
def test_a_line_that_is_no_request_is_named(text: str, line: int) -> None:
    with pytest.raises(BenchInputError, match=rf"Line {line} of t\.csv"):
        parse_trace("t.csv", text.splitlines(keepends=True))


def test_the_shared_traces_are_read_whole(baton_data: Path) -> None:
    sizes = {}
    for path in sorted((baton_data / "traces").glob("*.*")):
        with path.open(encoding="utf-8") as file:
            sizes[path.stem] = len(parse_trace(path.name, file))

    assert sizes == {
        "azure_2023_code": 8819,
        "azure_2023_conv": 19366,
        "mooncake_conversation": 12031,
        "mooncake_synthetic": 3993,
    }


def rows() -> list[TraceRow]:
    return [
        TraceRow(at_s=10.0 + index, prompt_tokens=100 * (index + 1), output_tokens=10 - index)
        for index in range(5)
    ]


def test_a_trace_is_replayed_from_its_first_request_at_its_scale() -> None:
    load = trace_load(rows(), name="t", num_requests=3, time_scale=0.5)

    assert [request.due_s for request in load.requests] == [0, 0.5, 1]
    assert [request.prompt_tokens for request in load.requests] == [100, 200, 300]
    assert load.num_cut == 0
    assert load.concurrency is None


def test_lengths_beyond_a_limit_are_cut_and_counted() -> None:
    load = trace_load(rows(), name="t", num_requests=5, max_prompt_tokens=450, max_output_tokens=9)

    assert [request.prompt_tokens for request in load.requests] == [100, 200, 300, 400, 450]
    assert [request.output_tokens for request in load.requests] == [9, 9, 8, 7, 6]
    assert load.num_cut == 2


def test_an_empty_trace_and_a_scale_of_nothing_are_refused() -> None:
    with pytest.raises(BenchInputError, match="no request"):
        trace_load(parse_trace("t", []), name="t", num_requests=3)
    with pytest.raises(BenchInputError, match="time scale"):
        trace_load(rows(), name="t", num_requests=3, time_scale=0)


@given(tokens=st.integers(1, 60), shared=st.integers(0, 60), seed=st.text(max_size=4))
def test_made_prompts_have_their_length_and_share_their_prefix_only(
    tokens: int, shared: int, seed: str
) -> None:
    source = WordPrompts(seed, shared_prefix_tokens=shared)

    first, second = (source.prompt(planned(i, tokens), "run").split() for i in range(2))

    assert len(first) == len(second) == max(tokens, shared + 1)
    assert first[:shared] == second[:shared]
    assert source.prompt(planned(0, tokens), "run").split() == first


def test_requests_and_runs_and_seeds_differ() -> None:
    prompts = {
        WordPrompts(seed).prompt(planned(index), run)
        for seed in "ab"
        for index in range(3)
        for run in ("first", "second")
    }

    assert len(prompts) == 12
    assert len({prompt.split()[0] for prompt in prompts}) > 3


def test_the_shared_prefix_is_the_same_in_every_run() -> None:
    source = WordPrompts("s", shared_prefix_tokens=10)

    one, other = (source.prompt(planned(), run).split() for run in ("one", "other"))

    assert one[:10] == other[:10]
    assert one[10:] != other[10:]


def test_equal_blocks_of_a_trace_give_equal_words() -> None:
    source = BlockPrompts("s")
    first, second = (
        source.prompt(planned(i, 2 * BLOCK_TOKENS, block_ids=blocks), "run").split()
        for i, blocks in enumerate([(0, 1), (0, 2)])
    )

    assert len(first) == len(second) == 2 * BLOCK_TOKENS
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]
    assert first[BLOCK_TOKENS:] != second[BLOCK_TOKENS:]
    again = source.prompt(planned(0, 2 * BLOCK_TOKENS, block_ids=(0, 1)), "next run").split()
    assert again[:BLOCK_TOKENS] != first[:BLOCK_TOKENS]


@pytest.mark.parametrize("length", [5, BLOCK_TOKENS, BLOCK_TOKENS + 5, 3 * BLOCK_TOKENS])
def test_a_prompt_of_blocks_has_the_length_of_the_request(length: int) -> None:
    prompt = BlockPrompts("s").prompt(planned(0, length, block_ids=(4, 5)), "run")

    assert len(prompt.split()) == length


def test_listed_prompts_come_in_order_and_again() -> None:
    source = ListedPrompts(["a", "b", "c"])

    assert [source.prompt(planned(i), "run") for i in (0, 1, 2, 3, -1)] == list("abcac")


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(BenchInputError):
        ListedPrompts(parse_prompts("f", ["\n"]))


def test_prompts_are_lines_or_objects() -> None:
    assert parse_prompts("f", ["one\n", "\n", "two"]) == ["one", "two"]
    objects = [{"prompt": "one"}, {"turns": ["two", "more"]}]
    assert parse_prompts("f", map(json.dumps, objects)) == ["one", "two"]


@pytest.mark.parametrize("line", ['{"turns": []}', "{}", "[1]", "plain", '{"prompt": 3}'])
def test_an_object_without_a_prompt_is_named(line: str) -> None:
    with pytest.raises(BenchInputError, match="Line 2 of f"):
        parse_prompts("f", ['{"prompt": "x"}', line])
