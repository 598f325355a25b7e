"""The options of `baton bench`. What does the work is imported inside: `--help` must be quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deployments.bench.plan import BenchOptions
    from deployments.bench.versus import Side

__all__ = ["bench_app"]

_SEED_BITS = 32
_Number = TypeVar("_Number", int, float)

bench_app = typer.Typer(
    help="Measure a running server, two in turns, or the quality of a dtype.",
    invoke_without_command=True,
)

_LOAD, _PROMPTS, _TRACE, _STREAMS = "Load", "Prompts and answers", "Trace", "Interference"


@bench_app.callback()
def bench(  # noqa: PLR0913  # a command's options are its arguments
    context: typer.Context,
    url: Annotated[str, typer.Option(envvar="BATON_URL", help="Where the server listens.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str | None, typer.Option(help="The served model.", show_default="the server's first")
    ] = None,
    versus: Annotated[
        str | None, typer.Option(metavar="URL", help="Another server, measured in turns.")
    ] = None,
    versus_model: Annotated[
        str | None, typer.Option(help="Its model.", show_default="its first")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of the two servers.")] = 4,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Closed loop: requests in flight, one load for each number.",
            show_default="1,4,16",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            help="Open loop: Poisson arrivals a second, one load for each number.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each load.", rich_help_panel=_LOAD)
    ] = 32,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests sent first, not counted.", rich_help_panel=_LOAD)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one request.", rich_help_panel=_LOAD)
    ] = 300.0,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds for everything.", rich_help_panel=_LOAD)
    ] = 1800.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed sends the same prompts.",
            show_default="a new one",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Words of a prompt.", rich_help_panel=_PROMPTS)
    ] = 128,
    shared_prefix: Annotated[
        int,
        typer.Option(min=0, help="Words that all prompts begin with.", rich_help_panel=_PROMPTS),
    ] = 0,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, plain or JSON; mt-bench takes those of the shared data.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens at most.", rich_help_panel=_PROMPTS)
    ] = 64,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Ask for exactly that many; some servers refuse the field.",
            rich_help_panel=_PROMPTS,
        ),
    ] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask for chat completions.", rich_help_panel=_PROMPTS),
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=_PROMPTS)
    ] = 0.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="BATON_API_KEY", help="Sent as bearer.", rich_help_panel=_PROMPTS),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Open loop: a trace's arrivals and lengths; a file, or a name in the shared data.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(help="Multiplies its times: 0.5 is twice as fast.", rich_help_panel=_TRACE),
    ] = 1.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cuts longer prompts.", rich_help_panel=_TRACE)
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cuts longer answers.", rich_help_panel=_TRACE)
    ] = None,
    interference: Annotated[
        bool,
        typer.Option(
            "--interference",
            help="Steady streams alone, then with long prompts: what they keep of their rate.",
            rich_help_panel=_STREAMS,
        ),
    ] = False,
    streams: Annotated[
        int, typer.Option(min=1, help="Steady streams.", rich_help_panel=_STREAMS)
    ] = 4,
    stream_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of each of their requests.", rich_help_panel=_STREAMS)
    ] = 64,
    stream_output_tokens: Annotated[
        int, typer.Option(min=1, help="Of each of their requests.", rich_help_panel=_STREAMS)
    ] = 128,
    long_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of a long prompt.", rich_help_panel=_STREAMS)
    ] = 1500,
    period: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two.", rich_help_panel=_STREAMS)
    ] = 4.0,
    duration: Annotated[
        float, typer.Option(min=1, help="Seconds of either phase.", rich_help_panel=_STREAMS)
    ] = 20.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="A target that good requests meet: ttft, itl, tpot or e2e; repeatable.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there.")
    ] = None,
) -> None:
    """Measure a running server, or two of them in turns."""
    if context.invoked_subcommand is not None:
        return
    from deployments.bench.client import RequestStyle
    from deployments.bench.interference import Interference
    from deployments.bench.measure import parse_target
    from deployments.bench.plan import BenchOptions
    from deployments.bench.run import ServerTarget
    from deployments.bench.workload import Lengths

    is_closed = rate is None and trace is None and not interference
    options = BenchOptions(
        concurrencies=_numbers(concurrency or ("1,4,16" if is_closed else ""), int),
        rates=_numbers(rate or "", float),
        trace=trace,
        interference=Interference(
            streams=streams,
            steady=Lengths(prompt_tokens=stream_prompt_tokens, output_tokens=stream_output_tokens),
            long=Lengths(prompt_tokens=long_prompt_tokens, output_tokens=_LONG_OUTPUT_TOKENS),
            period_s=period,
            duration_s=duration,
        )
        if interference
        else None,
        num_requests=requests,
        lengths=Lengths(prompt_tokens=prompt_tokens, output_tokens=output_tokens),
        shared_prefix_tokens=shared_prefix,
        prompts=prompts,
        time_scale=time_scale,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        targets=tuple(parse_target(text) for text in goodput or ()),
        seed=_new_seed() if seed is None else seed,
        warmup=warmup,
        timeout_s=timeout,
        max_seconds=max_seconds,
        rounds=rounds,
    )
    style = RequestStyle(is_chat=chat, ignore_eos=ignore_eos, temperature=temperature)
    targets: dict[Side, ServerTarget] = {"A": ServerTarget(url=url, model=model)}
    if versus is not None:
        targets["B"] = ServerTarget(url=versus, model=versus_model)
    _run(options, style, targets, api_key=api_key, json_file=json_file)


_LONG_OUTPUT_TOKENS = 4
"""A long prompt is there for its prefill."""


@bench_app.command()
def quality(
    text_file: Annotated[Path, typer.Argument(help="A text file in UTF-8.")],
    model: Annotated[str, typer.Option(help="As in model.source.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="The dtype to judge: bf16 or fp32.")] = "bf16",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text at most.")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="Tokens of one sequence.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 256,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads.", show_default="all cores")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Perplexity of a dtype in Baton's own engine, and how far it is from fp32."""
    # Before torch is loaded. Compute threads that spin are many times slower on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from deployments.bench.quality import QualityOptions, measure_file, quality_as_text

    disable_progress_bar()
    options = QualityOptions(
        dtype=dtype,
        max_tokens=tokens,
        window_tokens=window,
        chunk_tokens=chunk,
        threads=threads,
    )
    result = measure_file(
        text_file, model, options, environ=os.environ, console=Console(stderr=True)
    )
    typer.echo(quality_as_text(result))
    _write_json(json_file, result.as_json())


def _run(
    options: BenchOptions,
    style: Any,
    targets: Mapping[Side, Any],
    *,
    api_key: str | None,
    json_file: Path | None,
) -> None:
    import asyncio

    from rich.console import Console

    from deployments.bench.display import BenchDisplay
    from deployments.bench.plan import make_plan
    from deployments.bench.report import report_as_json, servers_as_text
    from deployments.bench.run import open_report, run_bench

    plan = make_plan(options, os.environ)
    report = open_report(options, style, targets)
    typer.echo(servers_as_text(report))
    try:
        asyncio.run(
            run_bench(
                report,
                options,
                plan,
                style,
                api_key=api_key,
                observer=BenchDisplay(Console(stderr=True), typer.echo),
            )
        )
    finally:
        # What was measured before an interrupt is measured.
        _write_json(json_file, report_as_json(report))


def _write_json(file: Path | None, content: Any) -> None:
    import json

    from deployments.bench.errors import BenchInputError

    if file is None:
        return
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchInputError(f"{file} cannot be written: {error}.") from error


def _numbers(text: str, parse: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """`1,4,16` as numbers above 0."""
    from deployments.bench.errors import BenchInputError

    try:
        numbers = tuple(parse(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise BenchInputError(f"{text!r} is not a list of numbers such as 1,4,16.") from error
    if any(number <= 0 for number in numbers):
        raise BenchInputError(f"Each number of {text!r} must be above 0.")
    return numbers


def _new_seed() -> int:
    """Another one at each call, so that no server's cache knows the prompts of the last run."""
    import secrets

    return secrets.randbits(_SEED_BITS)
