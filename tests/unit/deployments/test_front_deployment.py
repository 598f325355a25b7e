"""The Front deployment: what it tells Serve, without Serve and without a model."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from deployments.decode import Decode
from deployments.front import Front
from deployments.prefill import Prefill


class Replica(Front):
    """One that has only what a test gives it."""

    def __del__(self) -> None:
        """Nothing was started."""


def replica(*, is_watching: bool) -> Replica:
    made = Replica.__new__(Replica)
    made._pool = SimpleNamespace(is_watching=is_watching)
    return made


async def test_a_front_that_finds_no_new_worker_any_more_has_serve_replace_it():
    await replica(is_watching=True).check_health()
    with pytest.raises(RuntimeError, match="stopped looking for workers"):
        await replica(is_watching=False).check_health()


SERVE_S = {"check_health", "record_autoscaling_stats"}
"""What Serve calls itself, beside what begins with two underscores."""


@pytest.mark.parametrize(
    ("deployment", "sealed", "others"),
    [
        (Front, {"control"}, set()),
        (Decode, {"control"}, set()),
        (Prefill, {"control", "prefill"}, {"_leave"}),  # which is what `__del__` does
    ],
)
def test_serve_finds_no_method_by_name_that_takes_calls_unsealed(deployment, sealed, others):
    """It calls any that there is, for whoever has Ray's token."""
    ours = [vars(base) for base in deployment.__mro__ if base.__module__.startswith("deployments.")]
    own = {name for names in ours for name, value in names.items() if inspect.isroutine(value)}
    named = {name for name in own if not name.startswith("__")}
    assert sealed <= named <= sealed | others | SERVE_S
