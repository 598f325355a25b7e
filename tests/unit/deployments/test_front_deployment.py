"""The Front deployment: what it tells Serve, without Serve and without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deployments.front import Front


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
