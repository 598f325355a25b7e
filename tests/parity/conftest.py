"""Where the comparisons of a session are entered, and where their table is printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity.ledger import Ledger
from tests.parity.subjects import Extent
from workers.models.store import default_cache_dir

_LEDGER = pytest.StashKey[Ledger]()

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
    """One ledger for the session."""
    config.stash[_LEDGER] = Ledger()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table of models and modes, after everything else."""
    ledger = config.stash.get(_LEDGER, None)
    if ledger is not None and ledger.cells:
        terminalreporter.section("equal to transformers' generate")
        for line in ledger.lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def ledger(request: pytest.FixtureRequest) -> Ledger:
    """All comparisons of this session."""
    return request.config.stash.setdefault(_LEDGER, Ledger())


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
