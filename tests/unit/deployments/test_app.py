"""What each replica books of its host."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.app import build


def options(device: str, share: float = 1.0) -> list[dict[str, Any]]:
    """Of decode's replicas, then of prefill's."""
    engine = {"gpu_share": share}
    settings = {
        "model": {"device": device},
        "decode": {"engine": engine},
        "prefill": {"engine": engine},
    }
    front = build({"settings": settings})
    _, decode, prefill = front._bound_deployment.init_args
    return [each._bound_deployment.ray_actor_options for each in (decode, prefill)]


@pytest.mark.parametrize(("device", "booked"), [("cpu", 0), ("cuda", 0.5)])
def test_workers_of_a_model_for_gpus_book_their_share_of_one(device: str, booked: float) -> None:
    assert [each["num_gpus"] for each in options(device, 0.5)] == [booked, booked]
