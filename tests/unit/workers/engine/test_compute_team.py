"""Compute threads have a core each while they take all cores, and roam otherwise."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.engine.compute_team import ComputeTeam
from workers.engine.openmp import loaded_openmp

CORES = sorted(os.sched_getaffinity(0))
needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nothing to place")
needs_gnu = pytest.mark.skipif(loaded_openmp() is None, reason="torch has another OpenMP here")


@pytest.fixture
def in_thread():
    """Calls in one thread of their own, whose team, number and place are not the tests'."""
    before = torch.get_num_threads()
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield lambda call: thread.submit(call).result()
    torch.set_num_threads(before)


def places(team: ComputeTeam) -> list[set[int]]:
    """Where the threads may run that were placed; the caller is the first."""
    return [os.sched_getaffinity(thread_id) for thread_id in team.placed]


@needs_cores
@needs_gnu
def test_each_thread_has_a_core_while_they_take_all(in_thread):
    def take_turns():
        team, matrix = ComputeTeam(loaded_openmp()), torch.ones(600, 600)
        for _ in range(2):
            team.resize(len(CORES))
            _ = matrix @ matrix
            team.check()
            assert sorted(places(team), key=min) == [{core} for core in CORES]
            assert os.sched_getaffinity(0) in places(team)
            threads = tuple(team.placed)
            team.resize(len(CORES) - 1)
            assert places(team) == []
            assert os.sched_getaffinity(0) == set(CORES)
            for thread_id in threads[: len(CORES) - 1]:
                assert os.sched_getaffinity(thread_id) == set(CORES)

    in_thread(take_turns)


class Passing:
    """An OpenMP whose threads end with each call, but for the caller."""

    def in_each(self, threads, call):
        call(0)
        for number in range(1, threads):
            thread = threading.Thread(target=call, args=(number,))
            thread.start()
            thread.join()


def until_ended(thread_ids):
    """A joined thread may be there for a moment more."""
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/self/task/{thread_id}").exists() for thread_id in thread_ids):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@needs_cores
def test_threads_that_do_not_last_are_not_placed_again(in_thread, caplog):
    def compute():
        team = ComputeTeam(Passing())
        team.resize(len(CORES))
        _, *passing = team.placed
        assert len(passing) == len(CORES) - 1
        until_ended(passing)
        team.check()
        assert os.sched_getaffinity(0) == set(CORES)
        team.resize(1)
        team.resize(len(CORES))
        assert not team.placed

    in_thread(compute)
    assert "do not last" in caplog.text


@needs_cores
@needs_gnu
def test_a_core_that_has_gone_leaves_all_to_roam(in_thread, monkeypatch):
    def compute():
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _: {*CORES, 1023})
            team = ComputeTeam(loaded_openmp())
            team.resize(len(CORES) + 1)
        assert not team.placed
        assert os.sched_getaffinity(0) == set(CORES)

    in_thread(compute)


def test_without_an_openmp_only_their_number_changes(in_thread):
    def compute():
        team = ComputeTeam()
        team.resize(len(CORES))
        assert not team.placed
        assert torch.get_num_threads() == len(CORES)

    in_thread(compute)


@pytest.mark.parametrize("others", [[], ["/usr/lib/libiomp5.so"], ["/opt/a b/libgomp-a.so.1"]])
@needs_gnu
def test_threads_are_reached_through_gnu_s_openmp_if_it_is_the_only_one(tmp_path, others):
    own = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    maps = tmp_path / "maps"
    more = [f"7f00-7f01 r-xp 00000000 08:01 {number} {path}" for number, path in enumerate(others)]
    maps.write_text("\n".join([*own, *more]))
    assert (loaded_openmp(maps) is None) == bool(others)


def test_torch_here_has_gnu_s_openmp():
    """Or else all that needs it was skipped: pip's torch for Linux brings it along."""
    if "libgomp" not in Path("/proc/self/maps").read_text(encoding="utf-8"):
        pytest.skip("torch has another OpenMP here")
    assert loaded_openmp() is not None


@pytest.mark.parametrize("text", ["", "7f00-7f01 r-xp 00000000 08:01 1 /nowhere/libgomp.so.1"])
def test_there_may_be_no_openmp(tmp_path, text):
    maps = tmp_path / "maps"
    maps.write_text(text)
    assert loaded_openmp(maps) is None
    assert loaded_openmp(tmp_path / "absent") is None
