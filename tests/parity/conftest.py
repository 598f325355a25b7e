"""Where the comparisons of a session are entered, and where their table is printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.ledger import Ledger
from tests.parity.subjects import Extent
from workers.models.store import default_cache_dir

_LEDGER = pytest.StashKey[Ledger]()
_OUTPUT = "equal to generate"
"""A worker's ledger in what it hands over."""

_SAMPLE = Extent(
    name="sample",
    num_prompts=2,
    num_tokens=6,
    longest_document=150,
    num_tiny_prompts=4,
    num_tiny_tokens=12,
)
_ALL = Extent(
    name="all",
    num_prompts=32,
    num_tokens=64,
    longest_document=1800,
    num_tiny_prompts=16,
    num_tiny_tokens=32,
)


def pytest_configure(config: pytest.Config) -> None:
    """One ledger for the session, and one for each worker of pytest-xdist."""
    config.stash[_LEDGER] = Ledger()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker has compared goes into the session's ledger."""
    if output := getattr(node, "workeroutput", {}).get(_OUTPUT):
        node.config.stash[_LEDGER].merge(Ledger.from_json(output))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its ledger over; the session fails if too many prompts differ by a tie."""
    ledger = session.config.stash[_LEDGER]
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = ledger.to_json()
    elif ledger.has_too_many_ties and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table of models and modes, after everything else."""
    ledger = config.stash[_LEDGER]
    if ledger.prompts:
        terminalreporter.section("equal to transformers' generate")
        for line in ledger.lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> Ledger:
    """All comparisons of this session."""
    return request.config.stash[_LEDGER]


@pytest.fixture(scope="session")
def extent() -> Extent:
    """Everything with BATON_TEST_ALL=1, else a seeded sample."""
    return _ALL if os.environ.get("BATON_TEST_ALL") == "1" else _SAMPLE


@pytest.fixture(scope="session")
def reference_folder() -> Path:
    """Where references are kept between sessions."""
    return default_cache_dir(os.environ) / "parity"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other take many times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
