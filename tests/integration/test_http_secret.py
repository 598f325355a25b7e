"""The deployment's secret is with those who need it, and nowhere that others look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.secret import SECRET_VARIABLE
from kv_transfer.authentication import MIN_SECRET_BYTES
from kv_transfer.sealing import REFUSAL
from tests.fakes.certificates import Authority
from tests.integration.plain_caller import CONTROL_CALLS, NUM_FORMS
from tests.tools.baton_server import MODEL, BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [100 + i % 900 for i in range(300)]  # long enough for the prefill worker


def complete(server: BatonServer) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == httpx.codes.OK, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def secret_of(process: psutil.Process) -> str:
    return process.environ()[SECRET_VARIABLE]


def files_with(text: bytes, directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_workers_share_a_fresh_secret_that_nobody_is_shown(baton_server: BatonServer) -> None:
    complete(baton_server)
    replicas = baton_server.replicas()

    secret = secret_of(replicas["Decode"])

    assert secret_of(replicas["Prefill"]) == secret
    assert len(secret) >= MIN_SECRET_BYTES
    commands = [" ".join(process.cmdline()) for process in replicas.values()]
    shown = [
        httpx.get(f"{baton_server.base_url}/metrics", timeout=30).text,
        baton_server.log.read_text(),
        *commands,
    ]
    assert [text for text in shown if secret in text] == []
    logs = (baton_server.directory / "logs").resolve()
    assert list(logs.glob("worker-*.err"))
    for written in (baton_server.directory, logs.parents[2]):  # the second is Ray's and HAProxy's
        assert files_with(secret.encode(), written) == []


def calls_of_who_has_ray_s_token_alone(server: BatonServer) -> dict[str, Any]:
    """The caller is a process of its own, so that this one's Ray stays that of other tests."""
    called = subprocess.run(
        [sys.executable, "-m", "tests.integration.plain_caller", server.ray_address],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(server.ray_token),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert called.returncode == 0, called.stderr
    said: dict[str, Any] = json.loads(called.stdout.splitlines()[-1])
    return said


def test_no_process_does_or_tells_anything_for_who_has_ray_s_token_alone(
    baton_server: BatonServer,
) -> None:
    """No prompt, no metrics, no address; nothing drains, and no request ends."""
    text = complete(baton_server)
    before = baton_server.wait_until_idle()

    said = calls_of_who_has_ray_s_token_alone(baton_server)

    assert said["prompt"] == NUM_FORMS * [[repr(REFUSAL)]]
    assert len(said["control"]) == sum(map(len, CONTROL_CALLS.values()))
    for call, answers in said["control"].items():
        assert answers == NUM_FORMS * [repr(REFUSAL)], call
    for call, answer in said["by_name"].items():
        assert "that does not exist" in answer, call
    after = baton_server.wait_until_idle()
    refused = {role.lower(): NUM_FORMS * len(methods) for role, methods in CONTROL_CALLS.items()}
    refused["prefill"] += NUM_FORMS
    strangers = "baton_strangers_total"
    for role, count in refused.items():
        assert after.value(strangers, role=role) - before.value(strangers, role=role) == count, role
    for name in ("baton_leases_opened_total", "baton_computed_prompt_tokens_total"):
        assert after.value(name, role="prefill") == before.value(name, role="prefill"), name
    assert complete(baton_server) == text
    last = baton_server.wait_until_idle()
    failures = "baton_handoff_failures_total"  # of other tests, on this server, there may be some
    assert last.value(failures, role="decode") == before.value(failures, role="decode")


def test_kv_moves_inside_tls_and_the_text_stays_the_same(
    baton_server: BatonServer, tmp_path: Path
) -> None:
    """Files and secret are given, as in a cluster; TLS needs a hand-off over tcp."""
    files = Authority(tmp_path, "ca").issue("worker")
    paths = {"certificate": files.certificate, "key": files.key, "ca": files.ca}
    tls = json.dumps({name: str(path) for name, path in paths.items()})
    given = "given-by-the-test-given-by-the-test"
    path = tmp_path / "secret"
    path.write_text(given, encoding="utf-8")
    expected = complete(baton_server)
    settings = ("transfer.transport=tcp", f"transfer.tls={tls}")

    with BatonServer.started(
        tmp_path, more=settings, environ={"BATON_SECRET_FILE": str(path)}
    ) as server:
        text = complete(server)
        scrape = server.wait_until_idle()
        held = secret_of(server.replicas()["Prefill"])

    assert text == expected
    assert held == given
    assert scrape.value("baton_confirms_total", role="prefill", verdict="valid") == 1
    assert scrape.value("baton_strangers_total", role="prefill") == 0
