"""Which worker a request goes to: not one that lost it, not one that goes, and the freer of two."""

from __future__ import annotations

import random

import pytest

from deployments.channel.choice import Candidate, choose
from workers.messages import WorkerLoad


def candidate(
    worker: str,
    *,
    outstanding: int = 0,
    others: int = 0,
    waiting: int = 0,
    blocks: int = 10,
    takes_requests: bool = True,
    is_leaving: bool = False,
    is_silent: bool = False,
) -> Candidate:
    load = WorkerLoad(
        takes_requests=takes_requests,
        requests=others,
        waiting=waiting,
        available_blocks=blocks,
        is_leaving=is_leaving,
    )
    return Candidate(worker=worker, outstanding=outstanding, load=load, is_silent=is_silent)


def chosen(*candidates: Candidate, avoid: tuple[str, ...] = ()) -> set[str | None]:
    rng = random.Random(3)
    return {choose(candidates, avoid, rng) for _ in range(60)}


A, B, C = candidate("a"), candidate("b"), candidate("c")


@pytest.mark.parametrize(
    ("avoid", "expected"),
    [((), {"a", "b", "c"}), (("a",), {"b", "c"}), (("a", "b"), {"c"})],
)
def test_avoided_workers_are_left_out(avoid, expected):
    assert chosen(A, B, C, avoid=avoid) == expected


def test_with_nobody_else_an_avoided_worker_is_asked_again():
    assert chosen(A, avoid=("a",)) == {"a"}


def test_without_workers_there_is_no_choice():
    assert chosen() == {None}


@pytest.mark.parametrize(
    "busier",
    [
        {"outstanding": 1},
        {"others": 1},
        {"waiting": 1},
        {"blocks": 9},
        {"takes_requests": False},
        {"is_leaving": True},
        {"is_silent": True},
    ],
)
def test_the_freer_of_two_is_taken(busier):
    assert chosen(candidate("busier", **busier), A) == {"a"}


def test_own_requests_count_as_those_of_others_do():
    assert chosen(candidate("mine", outstanding=2, others=1), candidate("theirs", others=2)) == {
        "theirs"
    }


def test_the_least_busy_of_three_does_not_get_everything():
    """Every Front has the same report: if all followed it, all would go there."""
    loaded = [candidate("a"), candidate("b", others=1), candidate("c", others=2)]
    assert chosen(*loaded) == {"a", "b"}


@pytest.mark.parametrize(
    "away", [{"is_leaving": True}, {"is_silent": True}, {"takes_requests": False}]
)
def test_a_worker_that_is_about_to_be_replaced_is_never_asked(away):
    """A request waits for the one that comes: what this one had to say, it would say each time."""
    assert chosen(candidate("a", **away)) == {None}
