from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.bench.errors import BenchInputError
from deployments.bench.interference import Interference
from deployments.bench.plan import BenchOptions, make_plan
from deployments.bench.prompts import BlockPrompts, ListedPrompts, WordPrompts
from deployments.bench.traces import BLOCK_TOKENS
from deployments.bench.workload import Lengths, Load

LENGTHS = Lengths(prompt_tokens=20, output_tokens=5)
INTERFERENCE = Interference(streams=1, steady=LENGTHS, long=LENGTHS, period_s=1.0, duration_s=5.0)


def options(**more: Any) -> BenchOptions:
    return BenchOptions(**{"lengths": LENGTHS, "seed": 1, "num_requests": 3, **more})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Shared data, as far as plans look at it."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "prompts").mkdir()
    (tmp_path / "traces/azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n"
    )
    (tmp_path / "traces/moon.jsonl").write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}\n'
    )
    (tmp_path / "prompts/mt_bench_questions.jsonl").write_text('{"turns": ["Why\u2028so?", "x"]}\n')
    return tmp_path


@pytest.mark.parametrize(
    "chosen",
    [{}, {"rates": (1.0,), "concurrencies": (1,)}, {"trace": "t", "interference": INTERFERENCE}],
)
def test_exactly_one_kind_of_load_is_chosen(chosen: dict[str, Any]) -> None:
    with pytest.raises(BenchInputError, match="Choose one"):
        options(**chosen)


def test_each_number_is_a_load_of_its_own() -> None:
    closed = make_plan(options(concurrencies=(1, 4)), {})
    rates = make_plan(options(rates=(1.0, 4.0)), {})

    assert [point.label for point in closed.points] == ["concurrency 1", "concurrency 4"]
    assert [point.label for point in rates.points] == ["rate 1/s", "rate 4/s"]
    assert isinstance(closed.prompts, WordPrompts)
    assert closed.warm_up == Lengths(prompt_tokens=20, output_tokens=8)


def test_the_seed_gives_the_same_arrivals() -> None:
    one, same, other = (make_plan(options(rates=(1.0,), seed=seed), {}) for seed in (1, 1, 2))

    assert one.points == same.points != other.points


def test_interference_is_a_point() -> None:
    plan = make_plan(options(interference=INTERFERENCE), {})

    assert plan.points == (INTERFERENCE,)
    assert plan.warm_up.prompt_tokens == 20


def test_a_trace_is_found_by_its_name_in_the_shared_data(data: Path) -> None:
    plan = make_plan(options(trace="azure"), {"BATON_DATA": str(data)})

    [load] = plan.points
    assert isinstance(load, Load)
    assert load.label == "trace azure"
    assert load.requests[0].prompt_tokens == 48
    assert isinstance(plan.prompts, WordPrompts)


def test_a_trace_with_blocks_is_sent_with_what_they_share(data: Path) -> None:
    chosen = options(trace=str(data / "traces/moon.jsonl"), max_prompt_tokens=550)

    plan = make_plan(chosen, {})

    [load] = plan.points
    assert isinstance(load, Load)
    assert isinstance(plan.prompts, BlockPrompts)
    assert load.num_cut == 1
    assert len(plan.prompts.prompt(load.requests[0], "run").split()) == 550 > BLOCK_TOKENS


def test_prompts_come_from_a_file_or_the_shared_questions(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Once\nTwice\n")

    for prompts, first in ((str(file), "Once"), ("mt-bench", "Why\u2028so?")):
        plan = make_plan(options(concurrencies=(1,), prompts=prompts), {"BATON_DATA": str(data)})
        [load] = plan.points
        assert isinstance(load, Load)
        assert isinstance(plan.prompts, ListedPrompts)
        assert plan.prompts.prompt(load.requests[0], "run") == first


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"trace": "nowhere"}, "it has: azure, moon"),
        ({"trace": "nowhere.csv"}, "cannot be read"),
        ({"trace": "no/where"}, "cannot be read"),
        ({"concurrencies": (1,), "prompts": "nowhere.txt"}, "cannot be read"),
    ],
)
def test_a_file_that_is_not_there_is_named(data: Path, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchInputError, match=words):
        make_plan(options(**chosen), {"BATON_DATA": str(data)})


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(BenchInputError, match=r"bytes\.csv cannot be read"):
        make_plan(options(trace=str(tmp_path / "bytes.csv")), {})


@pytest.mark.parametrize(
    "chosen", [{"trace": "azure"}, {"concurrencies": (1,), "prompts": "mt-bench"}]
)
def test_missing_shared_data_says_what_to_set(tmp_path: Path, chosen: dict[str, Any]) -> None:
    with pytest.raises(BenchInputError, match="Set BATON_DATA"):
        make_plan(options(**chosen), {"BATON_DATA": str(tmp_path)})
