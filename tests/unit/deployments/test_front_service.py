"""What Front makes of a body: sequences, seeds, ids, a route; what it refuses by itself."""

from __future__ import annotations

import asyncio

import pytest

from deployments.openai.errors import InvalidRequestError, UnknownModelError
from tests.fakes.backend import tokens_then_end
from tests.fakes.front import EOS, MODEL, FakePolicy, make_codec, make_front


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@pytest.fixture
def front(codec):
    return make_front(tokens_then_end([5]), codec=codec)[0]


async def prepared(front, endpoint="completions", **fields):
    own = {"prompt": "hi"} if endpoint == "completions" else {}
    body = {"model": MODEL, **own, **fields}
    return await front.prepare(endpoint, body, request_id="req", arrived_at=10.0, timeout_s=5.0)


def seeds(generation) -> list[int]:
    return [plan.request.sampling.seed for plan in generation.plans]


async def test_choices_are_prompts_times_n_in_order(front):
    generation = await prepared(front, prompt=["hi", "ho"], n=2, seed=7)
    assert [plan.index for plan in generation.plans] == [0, 1, 2, 3]
    assert [plan.prompt_index for plan in generation.plans] == [0, 0, 1, 1]
    prompts = [plan.request.prompt_token_ids for plan in generation.plans]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert generation.deadline == 15.0


async def test_a_given_seed_gives_a_prompt_the_same_choices_alone_and_in_a_list(front):
    """Row 73."""
    alone = await prepared(front, prompt="ho", n=2, seed=7)
    listed = await prepared(front, prompt=["hi", "ho"], n=2, seed=7)
    assert seeds(listed)[2:] == seeds(alone)
    assert len(set(seeds(alone))) == 2


async def test_drawn_seeds_differ_between_prompts_choices_and_requests(front):
    drawn = [
        *seeds(await prepared(front, prompt=["hi", "hi"], n=2)),
        *seeds(await prepared(front, prompt=["hi", "hi"], n=2)),
    ]
    assert len(set(drawn)) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)


async def test_two_requests_with_one_id_are_two_to_the_workers(front):
    first, second = await prepared(front, n=2), await prepared(front, n=2)
    ids = [plan.request.request_id for each in (first, second) for plan in each.plans]
    assert len(set(ids)) == 4
    assert all(request_id.startswith("req-") for request_id in ids)
    assert first.request_id == second.request_id == "req"


async def test_sampling_goes_down_as_asked(front):
    generation = await prepared(
        front, max_tokens=3, temperature=0, stop_token_ids=[9], priority=-2, stop="x"
    )
    (plan,) = generation.plans
    assert plan.request.sampling.max_tokens == 3
    assert plan.request.sampling.temperature == 0
    assert plan.request.sampling.stop_token_ids == {9, EOS}
    assert (plan.request.priority, plan.text.stops) == (-2, ("x",))


async def test_salt_goes_down_with_every_choice_and_is_shown_nowhere(front):
    generation = await prepared(front, n=2, cache_salt="tenant-secret")
    assert [plan.request.cache_salt for plan in generation.plans] == ["tenant-secret"] * 2
    assert "tenant-secret" not in repr(generation)
    assert (await prepared(front)).plans[0].request.cache_salt == ""


async def test_special_tokens_are_shown_on_request(front, codec):
    shown = (await prepared(front, skip_special_tokens=False)).plans[0].text.decode
    hidden = (await prepared(front)).plans[0].text.decode
    assert (shown([0]), hidden([0])) == ("<|start|>", "")


async def test_chat_is_encoded_by_the_template_with_its_special_tokens(front, codec):
    messages = [{"role": "user", "content": "hi"}]
    generation = await prepared(front, "chat_completions", messages=messages)
    ids = generation.plans[0].request.prompt_token_ids
    text = codec.decode(ids, skip_special_tokens=False)
    assert text == "<|start|>user hi<|end|><|start|>assistant "
    assert ids.count(0) == 2


async def test_the_policy_sees_the_agent_step_and_no_text(codec):
    policy = FakePolicy()
    front, _ = make_front(tokens_then_end([5]), codec=codec, policy=policy)
    await prepared(front, prompt=["hi", "hello there"], max_tokens=4)
    (step,) = policy.steps
    assert (step.request_id, step.model, step.max_tokens) == ("req", MODEL, 4)
    assert step.prompt_tokens > 1


async def test_an_unknown_model_is_refused_with_the_known_ones(front):
    with pytest.raises(UnknownModelError, match=MODEL):
        await prepared(front, model="other")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5279552648203111001]}, "prompt"),  # row 3
        ({"prompt": [[1, 2], [400]]}, "prompt"),
        ({"prompt": "hi " * 200}, "prompt"),  # row 25
        ({"prompt": ["hi"] * 129}, "prompt"),
        ({"prompt": ["hi"] * 65, "n": 2}, "prompt"),
        ({"max_tokens": 128}, "max_tokens"),
        ({"n": 9}, "n"),
    ],
)
async def test_what_no_worker_could_serve_is_refused_here(codec, fields, param):
    front, backend = make_front(tokens_then_end([5]), codec=codec, settings={"max_choices": 8})
    with pytest.raises(InvalidRequestError) as caught:
        await prepared(front, **fields)
    assert caught.value.param == param
    assert not backend.requests


async def test_chat_choices_are_bounded_too(codec):
    front, _ = make_front(tokens_then_end([5]), codec=codec, settings={"max_choices": 1})
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError) as caught:
        await prepared(front, "chat_completions", messages=messages, n=2)
    assert caught.value.param == "n"


def test_drawn_request_ids_differ(front):
    assert len({front.new_request_id() for _ in range(100)}) == 100


async def test_metrics_count_the_tasks_of_fronts_loop(front):
    """A task more shows at once: that is how one that leaks is found."""

    def counted():
        (found,) = [item for item in front.snapshot().samples if item.name == "baton_asyncio_tasks"]
        return found.value

    before = counted()
    waiting = asyncio.create_task(asyncio.Event().wait())
    assert counted() == before + 1
    waiting.cancel()
    await asyncio.wait({waiting})
    assert counted() == before
    assert "baton_asyncio_tasks{" in await front.metrics_text()
