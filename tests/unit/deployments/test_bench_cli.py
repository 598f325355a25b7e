"""`baton bench` over real sockets, to a scripted server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from deployments import cli
from deployments.bench.display import BenchDisplay
from tests.fakes.api_server import ApiScript, api_server

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script() -> ApiScript:
    return ApiScript()


@pytest.fixture
def url(script: ApiScript) -> Iterator[str]:
    with api_server(script) as address:
        yield address


@pytest.fixture
def run(tmp_path: Path):
    own = {name: None for name in os.environ if name.startswith("BATON_")}

    def run_bench(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["bench", *arguments], env=own)

    return run_bench


def test_a_closed_load_is_sent_and_reported(
    run, url: str, script: ApiScript, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    load = ["--concurrency", "1,2", "--requests", "3", "--warmup", "1", "--output-tokens", "5"]

    result = run("--url", url, *load, "--prompt-tokens", "9", "--seed", "4", "--json", str(file))

    assert result.exit_code == 0, result.stderr
    assert f"A  {url}  tiny\nseed 4\n" in result.stdout
    assert "concurrency 1\n  3 of 3 requests" in result.stdout
    assert "concurrency 2\n  3 of 3 requests" in result.stdout
    assert result.stderr == ""
    bodies = [body for _, body in script.requests]
    assert len(bodies) == 1 + 3 + 3
    assert [body["max_tokens"] for body in bodies] == [8] + [5] * 6
    assert {len(body["prompt"].split()) for body in bodies} == {9}
    assert not any("ignore_eos" in body for body in bodies)
    found = json.loads(file.read_text())
    assert [point["summary"]["num_finished"] for point in found["points"]] == [3, 3]
    assert found["points"][0]["summary"]["output_tokens_mean"] == 2
    assert found["options"]["lengths"] == {"prompt_tokens": 9, "output_tokens": 5}


def test_two_servers_are_compared(run, url: str) -> None:
    with api_server(ApiScript(models=["other"])) as second:
        result = run(
            *("--url", url, "--versus", second, "--rounds", "2", "--concurrency", "1"),
            *("--requests", "2", "--warmup", "0"),
        )

    assert result.exit_code == 0, result.stderr
    assert f"B  {second}  other" in result.stdout
    assert "A against B, medians of 2 rounds" in result.stdout
    # The scripted servers are threads of this very process.
    assert "cores used by anything else: not known" in result.stdout


def test_chat_ignore_eos_and_the_models_name_are_sent(run, url: str, script: ApiScript) -> None:
    options = ["--chat", "--ignore-eos", "--model", "mine", "--rate", "1000", "--requests", "2"]

    result = run("--url", url, *options, "--goodput", "e2e:60000")

    assert result.exit_code == 0, result.stderr
    assert "goodput" in result.stdout
    path, body = script.requests[-1]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["ignore_eos"]) == ("mine", True)


def test_interference_runs_both_phases(run, url: str) -> None:
    result = run(
        *("--url", url, "--interference", "--streams", "1", "--duration", "1", "--period", "0.4"),
        *("--long-prompt-tokens", "30", "--warmup", "0"),
    )

    assert result.exit_code == 0, result.stderr
    assert "rate kept" in result.stdout
    assert "2 long prompts: TTFT" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--concurrency", "1,x"], 2, "list of numbers"),
        (["--concurrency", "0"], 2, "above 0"),
        (["--rate", "1", "--concurrency", "1"], 2, "Choose one"),
        (["--trace", "a.csv", "--interference"], 2, "Choose one"),
        (["--goodput", "fast"], 2, "ttft:500"),
        (["--trace", "no/where.csv"], 2, "cannot be read"),
        (["--url", "ftp://x"], 2, "address of an HTTP server"),
        (["--url", "http://127.0.0.1:1"], 1, "Nothing listens"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(run, arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)

    assert result.exit_code == code
    assert words in result.stderr
    assert result.stderr.startswith("baton: ")


def test_a_server_that_refuses_all_is_an_error(run, url: str, script: ApiScript) -> None:
    script.error = (400, "unknown field stream_options")

    result = run("--url", url, "--concurrency", "1")

    assert result.exit_code == 1
    assert "http 400" in result.stderr
    assert "stream_options" in result.stderr


def test_figures_are_written_though_the_end_is_an_error(
    run, url: str, script: ApiScript, tmp_path: Path
) -> None:
    script.error = (503, "no worker")
    file = tmp_path / "out.json"

    result = run(
        *("--url", url, "--concurrency", "1", "--requests", "2", "--warmup", "0"),
        *("--json", str(file)),
    )

    assert result.exit_code == 1
    assert json.loads(file.read_text())["points"][0]["summary"]["failures"] == {"http 503": 2}


def test_json_that_cannot_be_written_is_told(run, url: str, tmp_path: Path) -> None:
    where = str(tmp_path / "none" / "out.json")

    result = run("--url", url, "--concurrency", "1", "--requests", "1", "--json", where)

    assert result.exit_code == 2
    assert f"{where} cannot be written" in result.stderr


def test_new_seeds_send_new_prompts(run, url: str, script: ApiScript) -> None:
    for _ in range(2):
        assert run("--url", url, "--concurrency", "1", "--requests", "1").exit_code == 0

    prompts = [body["prompt"] for _, body in script.requests]
    assert len(set(prompts)) == len(prompts) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere.txt"], "cannot be read"), (["x", "--dtype", "int3"], "'int3'")],
)
def test_quality_says_what_is_wrong(run, arguments: list[str], words: str) -> None:
    result = run("quality", *arguments)

    assert result.exit_code == 2
    assert words in result.stderr


def test_help_and_measuring_load_neither_tensors_nor_ray() -> None:
    program = (
        "import sys\n"
        "from deployments.cli import app\n"
        "try:\n    app()\n"
        "except SystemExit:\n    print('loaded', *sys.modules)\n"
    )
    for arguments, absent in (
        (["bench", "--help"], {"torch", "ray", "transformers", "httpx", "psutil"}),
        (["bench", "--url", "http://127.0.0.1:1"], {"torch", "ray", "transformers"}),
    ):
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )

        loaded = set(result.stdout.splitlines()[-1].split())
        assert "loaded" in loaded
        assert loaded & absent == set()


def test_a_terminal_gets_a_bar_and_a_pipe_none() -> None:
    for is_terminal in (True, False):
        shown = StringIO()
        console = Console(file=shown, force_terminal=is_terminal, width=100)
        display = BenchDisplay(console, print)
        display.advance()
        display.begin("A concurrency 3", 2)
        display.advance()
        display.end()
        display.end()

        assert ("A concurrency 3" in shown.getvalue()) is is_terminal


def test_a_skipped_load_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    BenchDisplay(Console(file=StringIO()), print).skipped("rate 9/s")

    assert "rate 9/s\n  not measured" in capsys.readouterr().out
