"""Compute threads have a core each while they take all cores, and roam otherwise."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

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
        team, matrix = ComputeTeam(environ={}), torch.ones(600, 600)
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


@needs_cores
def test_threads_that_do_not_last_are_not_placed_again(in_thread, caplog):
    def compute():
        team = ComputeTeam(Passing(), environ={})
        team.resize(len(CORES))
        assert len(team.placed) == len(CORES)
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
            team = ComputeTeam(environ={})
            team.resize(len(CORES) + 1)
        assert not team.placed
        assert os.sched_getaffinity(0) == set(CORES)

    in_thread(compute)


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_who_places_threads_by_openmp_s_own_variables_is_left_alone(in_thread, name):
    def compute():
        team = ComputeTeam(Passing(), environ={name: "x"})
        team.resize(len(CORES))
        assert not team.placed
        assert torch.get_num_threads() == len(CORES)

    in_thread(compute)


@pytest.mark.parametrize(
    "paths",
    [
        [],
        ["/usr/lib/libiomp5.so"],
        ["/usr/lib/libgomp.so.1", "/usr/lib/libiomp5.so"],
        ["/usr/lib/libgomp.so.1", "/opt/libgomp-a.so.1"],
        ["/nowhere/libgomp.so.1"],
    ],
)
def test_threads_are_reached_through_gnu_s_openmp_alone(tmp_path, paths):
    maps = tmp_path / "maps"
    lines = [f"7f00-7f01 r-xp 00000000 08:01 {number} {path}" for number, path in enumerate(paths)]
    maps.write_text("\n".join(["7f00-7f01 rw-p 00000000 00:00 0", *lines, ""]))
    assert loaded_openmp(maps) is None
    assert loaded_openmp(tmp_path / "absent") is None
