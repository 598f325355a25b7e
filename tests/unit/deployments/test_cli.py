from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from configs.schema import Settings
from deployments import cli
from deployments.version import installed_version
from tests.fakes.api_server import ApiScript, api_server
from workers.gpu_outlook import GpuOutlook

ROOT = Path(__file__).parents[3]
CONFIG = {
    "dtype": "bfloat16",
    "max_position_embeddings": 1024,
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 100,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory as far as `check` looks at it."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


@pytest.fixture
def script() -> ApiScript:
    return ApiScript()


@pytest.fixture
def url(script: ApiScript) -> Iterator[str]:
    with api_server(script) as address:
        yield address


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    """An empty cache, none of the developer's own settings, a dtype that no host chooses."""
    own = {name: None for name in os.environ if name.startswith("BATON_")}
    return {**own, "BATON_CACHE": str(tmp_path / "cache"), "BATON_MODEL__DTYPE": "fp32"}


@pytest.fixture
def run(environ: dict[str, str | None]):
    def run_baton(*arguments: str, input: str | None = None, **more: str) -> Result:  # noqa: A002  # the runner's own name
        runner = CliRunner()
        return runner.invoke(cli.app, arguments, input=input, env={**environ, **more})

    return run_baton


def test_check_prints_pools_and_every_invariant(run, model: Path) -> None:
    result = run("check", "local", "--set", f"model.source={model}")

    assert result.exit_code == 0
    assert "served as tiny-model" in result.stdout
    assert "128 B per token, 2.00 KiB per block of 16 tokens" in result.stdout
    assert result.stdout.count("ok    ") + result.stdout.count("ok  ") >= 5
    decode = next(line for line in result.stdout.splitlines() if line.startswith("decode"))
    assert decode.split()[3:5] == ["3072", "49152"]
    assert decode.split()[-1] == "48"
    assert result.stderr == ""


def test_check_fails_with_the_reason_on_stderr(run, model: Path) -> None:
    result = run("check", "-s", f"model.source={model}", "-s", "prefill.engine.pool_tokens=1023")

    assert result.exit_code == 1
    assert "FAIL  INV-POOL-WINDOW" in result.stdout
    assert "INV-POOL-WINDOW: The prefill pool holds 1023 tokens" in result.stderr
    assert "window of 1024" in result.stderr


def test_check_prints_json_for_programs(run, model: Path) -> None:
    result = run("check", "colocated", "--json", "--set", f"model.source={model}")

    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert answer["window"] == 1024
    assert [worker["role"] for worker in answer["workers"]] == ["decode"]
    assert answer["total_pool_bytes"] == 49_152 * 128
    assert {check["outcome"] for check in answer["checks"]} == {"holds"}


def test_check_json_is_whole_when_a_check_fails(run, model: Path) -> None:
    result = run("check", "--json", "-s", f"model.source={model}", "-s", "model.max_model_len=2048")

    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert "WINDOW" in result.stderr


def test_check_and_serve_refuse_what_blocks_cannot_hold(run, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen3_next"}))

    for command in ("check", "serve"):
        result = run(command, "local", "--set", f"model.source={model}")

        assert result.exit_code == 1
        assert "baton: RUNNER: A model of type qwen3_next cannot be served: it has" in result.stderr


def test_check_says_how_the_model_is_run(run, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama"}))

    text = run("check", "local", "--set", f"model.source={model}").stdout
    shown = json.loads(run("check", "local", "--json", "--set", f"model.source={model}").stdout)

    assert "The model is run as llama_shaped: llama is Llama-shaped." in text
    assert shown["runner"] == {
        "tier": "llama_shaped",
        "cause": "verified_family",
        "reason": "llama is Llama-shaped",
    }


def test_check_says_which_kv_is_given_up_behind_a_window(run, model: Path) -> None:
    sizes = {**CONFIG, "hidden_size": 8, "num_attention_heads": 1}
    config = {**sizes, "model_type": "gemma2", "sliding_window": 64, "architectures": ["G"]}
    (model / "config.json").write_text(json.dumps(config))
    weights = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(weights).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (model / "model.safetensors").write_bytes(content)

    result = run("check", "colocated", "-s", f"model.source={model}")
    answer = json.loads(run("check", "colocated", "--json", "-s", f"model.source={model}").stdout)

    assert "prefix cache on" in result.stdout
    assert "64 B of that only while the token is among the last 64 (1 of 2 layers)" in result.stdout
    groups = [(group["layers"], group["sliding_window"]) for group in answer["kv"]["groups"]]
    assert groups == [(1, None), (1, 64)]
    assert answer["kv"]["prefix_cache"] is True
    assert answer["workers"][0]["window_blocks"] == 64 + 21


def test_check_on_a_gpu_does_not_compare_with_the_hosts_memory(
    run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlook = GpuOutlook(num_gpus=2)
    monkeypatch.setattr("deployments.terminal.check.gpu_outlook", lambda *_: outlook)

    result = run("check", "-s", f"model.source={model}", "-s", "model.device=cuda")

    assert result.exit_code == 0
    assert "warn  MEMORY" in result.stdout
    assert "not run on a GPU so far" in result.stdout


def test_check_refuses_a_gpu_that_is_not_there(
    run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlook = GpuOutlook(num_gpus=0, obstacle="torch sees no GPU here")
    monkeypatch.setattr("deployments.terminal.check.gpu_outlook", lambda *_: outlook)

    result = run("check", "-s", f"model.source={model}", "-s", "model.device=cuda")

    assert result.exit_code == 1
    assert "FAIL  DEVICE" in result.stdout
    assert "model.device is cuda, but torch sees no GPU here" in result.stdout


def test_check_says_how_to_pull_a_missing_model(run) -> None:
    result = run("check", "local")

    assert result.exit_code == 1
    assert "baton models pull smollm2-135m" in result.stderr


@pytest.mark.parametrize("form", ["argument", "option", "both"])
def test_check_reads_a_file(run, model: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{source: {model}, name: mine}}\n")
    arguments = {
        "argument": [str(file)],
        "option": ["--file", str(file)],
        "both": ["local", "-f", str(file)],
    }

    result = run("check", *arguments[form])

    assert result.exit_code == 0, result.stderr
    assert "served as mine" in result.stdout
    assert ("prefill" in result.stdout) is (form == "both")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no preset 'nowhere'"),
        (["nowhere.yaml"], "No such file"),
        (["./nowhere"], "No such file"),
        (["--set", "http.prot=1"], "did you mean http.port?"),
        (["--set", "http.port"], "--set takes name=value"),
    ],
)
def test_wrong_settings_exit_with_two_and_a_sentence(run, arguments: list[str], words: str) -> None:
    result = run("check", *arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("baton: ")


def test_settings_come_from_the_environment_too(run) -> None:
    result = run("check", BATON_HTTP__PORT="no")

    assert result.exit_code == 2
    assert "(from BATON_HTTP__PORT)" in result.stderr


def test_serve_hands_over_the_settings(run, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    serving = ModuleType("deployments.serving")
    serving.serve = served.append  # type: ignore[attr-defined]  # a stand-in: the real one starts Ray
    monkeypatch.setitem(sys.modules, "deployments.serving", serving)

    result = run("serve", "--port", "8123", "--host", "0.0.0.0", "-s", "http.port=1")

    assert result.exit_code == 0, result.stderr
    [settings] = served
    assert settings.http.port == 8123
    assert settings.http.host == "0.0.0.0"
    assert settings.prefill is not None


def test_serve_refuses_a_short_secret_without_showing_it(run) -> None:
    result = run("serve", "colocated", BATON_SECRET="hunter2")

    assert result.exit_code == 2
    assert "baton: BATON_SECRET: a deployment secret needs at least 32 bytes" in result.stderr
    assert "hunter2" not in result.stderr


def test_models_list_names_the_catalogue_and_the_cache(run, tmp_path: Path) -> None:
    result = run("models", "list")

    assert result.exit_code == 0
    assert "smollm2-135m  not pulled" in result.stdout
    assert str(tmp_path / "cache") in result.stdout


def test_models_pull_refuses_an_unknown_name(run) -> None:
    result = run("models", "pull", "nosuch")

    assert result.exit_code == 1
    assert "'nosuch'" in result.stderr


def test_models_pull_prints_the_directory(run, model: Path) -> None:
    result = run("models", "pull", str(model))

    assert result.exit_code == 0
    assert result.stdout == f"{model}\n"


@pytest.mark.parametrize("options", [[], ["--no-stream"]])
def test_complete_prints_the_text_and_sends_the_options(
    run, url: str, script: ApiScript, options: list[str]
) -> None:
    given = ["--max-tokens", "5", "--temperature", "0", "--top-p", "0.5", "--seed", "-3"]

    result = run("complete", "Once", "--url", url, *given, "--stop", "a", "--stop", "b", *options)

    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello\n"
    [(path, body)] = script.requests
    assert path == "/v1/completions"
    body.pop("stream", None)
    assert body == {
        "model": "tiny",
        "prompt": "Once",
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "seed": -3,
        "stop": ["a", "b"],
    }


def test_complete_sends_nothing_that_was_not_given(run, url: str, script: ApiScript) -> None:
    run("complete", "Once", "--model", "named", BATON_URL=url)

    assert script.requests[0][1] == {"model": "named", "prompt": "Once", "stream": True}


def test_complete_reads_the_prompt_from_stdin(run, url: str, script: ApiScript) -> None:
    result = run("complete", "-", "--url", url, input="from\nstdin")

    assert result.exit_code == 0
    assert script.requests[0][1]["prompt"] == "from\nstdin"


def test_complete_tells_the_servers_refusal(run, url: str, script: ApiScript) -> None:
    script.error = (400, "the prompt is too long")

    result = run("complete", "Once", "--url", url)

    assert result.exit_code == 1
    assert result.stderr == "baton: The server refused the request (400): the prompt is too long\n"


def test_complete_keeps_what_came_before_an_error(run, url: str, script: ApiScript) -> None:
    script.error_event = "the worker was lost"

    result = run("complete", "Once", "--url", url)

    assert result.exit_code == 1
    assert result.stdout == "Hello"
    assert "the worker was lost" in result.stderr


@pytest.mark.parametrize("command", [["chat"], ["complete", "Once"]])
def test_nothing_listening_is_told(run, command: list[str]) -> None:
    with api_server(ApiScript()) as closed:
        pass

    result = run(*command, "--url", closed)

    assert result.exit_code == 1
    assert f"Nothing listens at {closed}" in result.stderr
    assert "baton serve" in result.stderr


def test_chat_answers_each_piped_line(run, url: str, script: ApiScript) -> None:
    result = run("chat", "--url", url, "--system", "be short", input="one\n/reset\ntwo\n")

    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hello\nHello\n"
    assert [path for path, _ in script.requests] == ["/v1/chat/completions"] * 2
    assert [message["content"] for message in script.requests[1][1]["messages"]] == [
        "be short",
        "two",
    ]


def test_interrupt_is_no_error_message(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("deployments.terminal.console.StandardTerminal.read", interrupted)
    with api_server(ApiScript()) as address:
        result = run("chat", "--url", address)

    assert result.exit_code == 130
    assert result.stderr == ""


def test_version_is_the_distributions(run) -> None:
    assert run("version").stdout == f"baton {installed_version()}\n"


def test_version_is_three_numbers_installed_or_not() -> None:
    assert [part.isdigit() for part in installed_version().split(".")] == [True] * 3


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["version"], 0), (["nosuch"], 2), (["check", "--port"], 2), (["check", "nowhere"], 2)],
)
def test_main_exits_with_the_commands_code(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    assert run_main(monkeypatch, *arguments) == code


def break_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("deployments.version.installed_version", broken)


def test_main_makes_a_sentence_of_what_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_version(monkeypatch)
    monkeypatch.delenv("BATON_DEBUG", raising=False)

    assert run_main(monkeypatch, "version") == 1

    assert capsys.readouterr().err.startswith("baton: unexpected ZeroDivisionError: by zero")


def test_main_shows_where_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    break_version(monkeypatch)
    monkeypatch.setenv("BATON_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["baton", "version"])

    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "ray", "transformers", "pydantic", "httpx", "yaml"}),
        (["models", "list"], {"torch", "ray", "transformers", "httpx", "huggingface_hub"}),
        (["check", "local"], {"torch", "ray", "transformers", "httpx", "huggingface_hub"}),
        (["complete", "x", "--url", "http://127.0.0.1:1"], {"torch", "ray", "transformers"}),
    ],
)
def test_commands_do_not_load_what_they_do_not_need(
    arguments: list[str], absent: set[str], tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from deployments.cli import app\n"
        "try:\n    app()\n"
        "except SystemExit:\n    print('loaded', *sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "BATON_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    loaded = set(result.stdout.splitlines()[-1].split())
    assert "loaded" in loaded
    assert loaded & absent == set()


class TypedChat:
    """`baton chat` in a process of its own on a pseudo terminal."""

    def __init__(self, address: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", "from deployments.cli import main; main()"]
        self._process = subprocess.Popen(
            [*command, "chat", "--url", address],
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        # Ctrl-C by the signal itself: the pseudo terminal is not the session's own.
        self._process.send_signal(signal.SIGINT)

    def expect(self, text: str) -> None:
        """Read until the text was shown; what comes before it is dropped."""
        while text not in self._shown:
            readable, _, _ = select.select([self._master], [], [], 30)
            assert readable, f"{text!r} never came after {self._shown!r}"
            self._shown += os.read(self._master, 4096).decode()
        self._shown = self._shown.partition(text)[2]

    def close(self) -> int:
        try:
            return self._process.wait(timeout=30)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._master)


def test_interrupt_on_a_terminal_stops_the_answer_and_end_of_file_leaves() -> None:
    script = ApiScript(hold=threading.Event())
    assert script.hold is not None
    with api_server(script) as address:
        chat = TypedChat(address)
        try:
            chat.expect("/reset")
            chat.expect("> ")
            chat.type("hi\n")
            chat.expect("Hello")
            assert script.held.wait(timeout=30)
            chat.interrupt()
            chat.expect("Stopped.")
            chat.expect("> ")
            script.hold.set()
            chat.type("more\n")
            chat.expect("Hello")
            chat.expect("> ")
            chat.type("\x04")
        finally:
            script.hold.set()
            code = chat.close()

    assert code == 0
    assert [message["content"] for message in script.requests[1][1]["messages"]] == [
        "hi",
        "Hello",
        "more",
    ]


def test_interrupt_in_a_pipe_ends_the_command_without_a_traceback() -> None:
    script = ApiScript(hold=threading.Event())
    assert script.hold is not None
    command = [sys.executable, "-c", "from deployments.cli import main; main()"]
    with api_server(script) as address:
        process = subprocess.Popen(
            [*command, "chat", "--url", address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write("hi\n")
            process.stdin.flush()
            assert script.held.wait(timeout=30)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            script.hold.set()
            process.kill()
            process.communicate()

    assert process.returncode == 130
    assert errors == ""
