"""The command line. Owns what commands there are; those of `baton bench` are in `bench`.

The work is in `terminal`, `bench` and below.

Each command imports what it needs inside its function: `baton --help` must not wait for pydantic
and httpx, and nothing but `serve` may wait for torch and ray. Errors that are expected become one
sentence on standard error here, and nowhere else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from deployments.bench.commands import bench_app

if TYPE_CHECKING:
    from configs.schema import Settings

__all__ = ["app", "main"]

_DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_PRESET = "local"
_FAILED = 1
_MISUSED = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _ExplainingGroup(TyperGroup):
    """Turns the errors that commands may end with into a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except Exception as error:
            exit_code = _exit_code(error)
            if exit_code is None:
                raise
            typer.echo(f"baton: {error}", err=True)
            raise typer.Exit(exit_code) from error


def _exit_code(error: Exception) -> int | None:
    """1 for what went wrong, 2 for what was asked wrongly, None for what nobody expected."""
    from configs.load import SettingsError
    from deployments.bench.errors import BenchError, BenchInputError
    from deployments.cluster.errors import ClusterError
    from deployments.secret import SecretError
    from deployments.terminal.errors import ApiError
    from workers.errors import WorkerError
    from workers.models.errors import ModelError

    if isinstance(error, (SettingsError, SecretError, BenchInputError)):
        return _MISUSED
    expected = (ApiError, BenchError, ClusterError, ModelError, WorkerError)
    return _FAILED if isinstance(error, expected) else None


app = typer.Typer(
    name="baton",
    help="LLM inference that prefills and decodes on different workers.",
    cls=_ExplainingGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The models in the cache and the catalogue.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")

Target = Annotated[
    str | None,
    typer.Argument(help="A preset, or a settings file.", show_default=_DEFAULT_PRESET),
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="A settings file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="One setting, e.g. kv.block_size=32."),
]
Url = Annotated[str, typer.Option(envvar="BATON_URL", help="Where the server listens.")]
Model = Annotated[
    str | None, typer.Option(help="The served model.", show_default="the server's first")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Output tokens at most.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds without a sign of the server.")]


@app.command()
def serve(
    target: Target = None,
    file: File = None,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
) -> None:
    """Start a server on this machine and keep it running until Ctrl-C."""
    extra = [] if port is None else [f"http.port={port}"]
    extra += [] if host is None else [f"http.host={host!r}"]
    settings = _load_settings(target, file, [*(overrides or []), *extra])
    from deployments.serving import serve as run_server

    run_server(settings)


@app.command()
def check(
    target: Target = None,
    file: File = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the sizes that settings lead to, and whether a server may start with them."""
    settings = _load_settings(target, file, overrides or [])
    import json

    from deployments.terminal.check import plan_as_json, plan_as_text, plan_for_host

    deployment = plan_for_host(settings, os.environ)
    if as_json:
        typer.echo(json.dumps(plan_as_json(settings, deployment), indent=2))
    else:
        typer.echo(plan_as_text(settings, deployment))
    from workers.checks import enforce

    enforce(deployment.checks)


@models_app.command("list")
def list_models() -> None:
    """List the models that can be pulled and those that are here."""
    from deployments.terminal.models import models_as_text
    from workers.models.catalog import MODELS
    from workers.models.store import ModelStore, default_cache_dir

    store = ModelStore(default_cache_dir(os.environ))
    typer.echo(models_as_text(MODELS, store.list()))
    typer.echo(f"\nThe cache is {store.cache_dir}.")


@models_app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(help="A name from `baton models list`, or a hub id.")],
) -> None:
    """Bring a model into the cache."""
    from rich.console import Console

    from deployments.terminal.models import PullDisplay, pull
    from workers.models.store import ModelStore, default_cache_dir

    with PullDisplay(Console(stderr=True)) as display:
        path = pull(ModelStore(default_cache_dir(os.environ)), name, display)
    typer.echo(str(path))


@app.command()
def complete(  # noqa: PLR0913  # a command's options are its arguments
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    url: Url = _DEFAULT_URL,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    timeout: Timeout = 600.0,
) -> None:
    """Complete a text with a running server."""
    from deployments.terminal.answers import ask
    from deployments.terminal.client import ApiClient

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = _sampling(max_tokens, temperature, top_p, seed, stop)
    with ApiClient(url, timeout_s=timeout) as client:
        body = {"model": model or client.models()[0], "prompt": text, **sampling}
        ask(client, "completions", body, _write, is_streamed=stream)
    _write("\n")


@app.command()
def chat(
    url: Url = _DEFAULT_URL,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
) -> None:
    """Talk to a running server; lines from a pipe are one message each."""
    from deployments.terminal.chat import Conversation, run_chat
    from deployments.terminal.client import ApiClient
    from deployments.terminal.console import StandardTerminal

    sampling = _sampling(max_tokens, temperature, top_p, seed, None)
    with ApiClient(url, timeout_s=timeout) as client:
        name = model or client.models()[0]
        conversation = Conversation(client, model=name, sampling=sampling, system=system)
        run_chat(conversation, StandardTerminal(sys.stdin, sys.stdout, sys.stderr))


@app.command()
def version() -> None:
    """Print Baton's version."""
    from deployments.version import installed_version

    typer.echo(f"baton {installed_version()}")


def main() -> None:
    """Entry point of the `baton` script."""
    try:
        app()
    except Exception as error:
        if os.environ.get("BATON_DEBUG"):
            raise
        typer.echo(
            f"baton: unexpected {type(error).__name__}: {error} (a bug; BATON_DEBUG=1 shows where)",
            err=True,
        )
        sys.exit(_FAILED)


def _load_settings(target: str | None, file: Path | None, overrides: list[str]) -> Settings:
    """Settings of a preset's name or of a file, whichever the target is."""
    from configs.load import load, presets

    preset = target
    if target is None:
        preset = None if file else _DEFAULT_PRESET
    elif file is None and target not in {shipped.name for shipped in presets()}:
        is_path = os.sep in target or target.endswith((".yaml", ".yml"))
        preset, file = (None, Path(target)) if is_path else (target, None)
    return load(preset, file=file, environ=os.environ, overrides=overrides)


def _sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> dict[str, Any]:
    """What was given, by its name in the API: the rest is the server's to choose."""
    values = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }
    return {name: value for name, value in values.items() if value is not None}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
