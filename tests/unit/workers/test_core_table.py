"""Each worker takes the cores that those leave which compute at the moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from workers import core_table
from workers.core_table import SHARES_EVENLY, CoreShare, join_core_table, threads_beside

NEIGHBOUR = """
import sys
from pathlib import Path
from workers.core_table import join_core_table
share = join_core_table(cores=8, fixed_threads=None, directory=Path(sys.argv[1]))
share.claim()
print("computing", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("claims", "threads"),
    [
        ([], 8),
        ([SHARES_EVENLY], 4),
        ([SHARES_EVENLY] * 2, 2),
        ([SHARES_EVENLY] * 20, 1),
        ([3], 5),
        ([3, SHARES_EVENLY], 2),
        ([8], 1),
        ([30], 1),
    ],
)
def test_what_others_do_not_claim_is_divided(claims, threads):
    assert threads_beside(claims, cores=8) == threads


@pytest.fixture
def join(tmp_path):
    def joined(fixed_threads: int | None = None) -> CoreShare:
        return join_core_table(cores=8, fixed_threads=fixed_threads, directory=tmp_path)

    return joined


def test_a_worker_gives_way_while_others_compute(join):
    mine, other, fixed = join(), join(), join(fixed_threads=2)
    assert mine.threads() == 8
    mine.claim()
    assert mine.threads() == 8
    other.claim()
    assert (mine.threads(), other.threads()) == (4, 4)
    fixed.claim()
    assert (mine.threads(), other.threads(), fixed.threads()) == (3, 3, 2)
    other.rest()
    assert (mine.threads(), fixed.threads()) == (6, 2)


@pytest.fixture
def neighbour(tmp_path):
    """Another process that computes, until its test is over."""
    command = [sys.executable, "-c", NEIGHBOUR, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"computing\n"
        yield process
        process.kill()


def test_the_claim_of_a_process_that_was_killed_counts_no_more(join, neighbour):
    mine = join()
    assert mine.threads() == 4
    neighbour.send_signal(signal.SIGKILL)
    neighbour.wait()
    deadline = time.monotonic() + 10
    while mine.threads() != 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_its_entry_goes_to_the_next_worker(join, neighbour, monkeypatch):
    monkeypatch.setattr(core_table, "_NUM_ENTRIES", 2)
    monkeypatch.setattr(core_table, "_SIZE_BYTES", 2 * 3 * 8)
    join()
    with pytest.raises(OSError, match="2 workers of this user"):
        join()
    neighbour.kill()
    neighbour.wait()
    assert join().threads() == 8


def test_a_process_with_the_number_of_one_that_died_is_another(join, monkeypatch):
    mine, other = join(), join()
    other.claim()
    assert mine.threads() == 4
    began = core_table._started(os.getpid())
    monkeypatch.setattr(core_table, "_started", lambda pid: began + 100)
    mine._seen_alive.clear()
    assert mine.threads() == 8


def test_a_file_that_others_may_write_is_not_used(join, tmp_path):
    join()
    [path] = tmp_path.iterdir()
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="not this user's own"):
        join()


def test_a_link_in_its_place_is_not_followed(join, tmp_path):
    (tmp_path / core_table._name()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        join()
    assert not (tmp_path / "elsewhere").exists()
