"""The router's hint: not again to a replica that lost the request, unless nobody else is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deployments.decode_router import DecodeRouter
from workers.engine.sampling_params import SamplingParams
from workers.messages import GenerateRequest


def replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def pending(*avoid: str) -> SimpleNamespace:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        avoid=avoid,
    )
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=[request], routing_context=context)


async def names(replicas, request) -> set[str]:
    router = object.__new__(DecodeRouter)  # it keeps no state of its own
    seen = set()
    for _ in range(30):
        for rank in await router.choose_replicas(replicas, request):
            seen |= {chosen.replica_id.unique_id for chosen in rank}
    return seen


REPLICAS = [replica("a"), replica("b"), replica("c")]


@pytest.mark.parametrize(
    ("avoid", "expected"),
    [((), {"a", "b", "c"}), (("a",), {"b", "c"}), (("a", "b"), {"c"})],
)
async def test_avoided_replicas_are_left_out(avoid, expected):
    assert await names(REPLICAS, pending(*avoid)) == expected


async def test_with_nobody_else_an_avoided_replica_is_asked_again():
    assert await names(REPLICAS[:1], pending("a")) == {"a"}


async def test_calls_that_name_nobody_to_avoid_go_anywhere():
    control = SimpleNamespace(args=[], routing_context=SimpleNamespace(should_backoff=False))
    assert await names(REPLICAS, control) == {"a", "b", "c"}
    assert await names(REPLICAS, None) == {"a", "b", "c"}


async def test_an_empty_pool_is_waited_for_with_pauses():
    request = pending()
    assert await names([], request) == set()
    assert request.routing_context.should_backoff
