"""Log-probabilities through whole workers: split as colocated, the first token's included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_transfer.handoff import FirstToken
from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.model_runner import fake_logprobs, generate
from tests.fakes.worker_rig import Client, Rig, RigConfig, generate_request, worker_rig
from workers.engine.sampling_params import SamplingParams
from workers.messages import GenerateRequest, PromptFrame, TokenFrame

PROMPT = tuple(range(60, 83))
"""Three chunks, six blocks."""
NUM_TOKENS = 5


def request_of(number: int = 0, **asked: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, **asked)
    return generate_request(PROMPT, sampling, number=number)


def of_prompt(num_top: int) -> list[TokenLogprobs]:
    return [fake_logprobs(PROMPT[:i], PROMPT[i], num_top) for i in range(1, len(PROMPT))]


def of_output(num_top: int) -> list[TokenLogprobs]:
    tokens = generate(PROMPT, NUM_TOKENS)
    return [fake_logprobs([*PROMPT, *tokens[:i]], token, num_top) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_what_is_asked_for_comes_wherever_the_prompt_is_computed(num_prefill):
    """Rows 68 and 69: prompt and output are independent wishes; the first token has its own."""
    async with worker_rig(RigConfig(num_prefill=num_prefill)) as rig:
        asked = [{"logprobs": 2}, {"prompt_logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 1}, {}]
        clients = [Client(rig, request_of(i, **wishes)) for i, wishes in enumerate(asked)]
        ends = [await client.finished() for client in clients]
        await rig.settled()

    by = "prefill-0" if num_prefill else "decode-0"
    assert {end.prefilled_by for end in ends} == {by}
    assert [client.logprobs for client in clients] == [of_output(2), [], of_output(0), []]
    assert [client.prompt_logprobs for client in clients] == [[], of_prompt(3), of_prompt(1), []]
    assert all(client.token_ids == generate(PROMPT, NUM_TOKENS) for client in clients)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_the_prompt_comes_before_the_first_token(num_prefill):
    async with worker_rig(RigConfig(num_prefill=num_prefill)) as rig:
        client = Client(rig, request_of(prompt_logprobs=0))
        await client.finished()

    kinds = [type(event) for event in client.events[:-1]]
    assert PromptFrame in kinds
    assert kinds.index(TokenFrame) == kinds.count(PromptFrame)


class Losing:
    """A prefill worker's sender that loses log-probabilities on the way to its grants."""

    def __init__(self, rig: Rig, *, of_first: bool) -> None:
        self._sender = rig.prefill_workers[0]._sender
        self._of_first = of_first

    def __getattr__(self, name: str) -> object:
        return getattr(self._sender, name)

    def grant(
        self,
        key,
        blocks,
        first: FirstToken | None,
        *,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        if self._of_first:
            first = first and replace(first, logprobs=None)
        else:
            prompt_logprobs = prompt_logprobs[1:]
        return self._sender.grant(key, blocks, first, prompt_logprobs=prompt_logprobs)


@pytest.mark.parametrize("of_first", [False, True])
async def test_log_probabilities_that_are_missing_fail_the_hand_off_not_the_answer(of_first):
    async with worker_rig(RigConfig(num_prefill=1)) as rig:
        rig.prefill_workers[0]._sender = Losing(rig, of_first=of_first)
        client = Client(rig, request_of(logprobs=1, prompt_logprobs=1))
        end = await client.finished()
        await rig.settled()

        assert end.prefilled_by == "decode-0"
        assert rig.decode.stats()[2].failures == {"CorruptTransferError": 2}
    assert client.logprobs == of_output(1)
    assert client.prompt_logprobs == of_prompt(1)


async def test_a_stop_token_is_named():
    first, second = generate(PROMPT, 2)
    async with worker_rig() as rig:
        sampling = SamplingParams(max_tokens=9, stop_token_ids=frozenset({second}), logprobs=0)
        client = Client(rig, generate_request(PROMPT, sampling))
        end = await client.finished()

    assert end.stop_token_id == second
    assert client.token_ids == [first]
    assert client.logprobs == of_output(0)[:1]


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_prompt_that_is_cached_is_scored_as_when_it_was_new(num_prefill):
    """The last request could find all blocks but one; it computes every row of them."""
    async with worker_rig(RigConfig(num_prefill=num_prefill, prefix_cache=True)) as rig:
        cold = Client(rig, request_of(0, prompt_logprobs=2))
        ends = [await cold.finished()]
        unscored = Client(rig, request_of(1, logprobs=1))
        ends.append(await unscored.finished())
        warm = Client(rig, request_of(2, prompt_logprobs=2, logprobs=1))
        ends.append(await warm.finished())
        await rig.settled()

    assert [end.cached_tokens > 0 for end in ends] == [False, True, False]
    assert warm.prompt_logprobs == cold.prompt_logprobs == of_prompt(2)
    assert warm.logprobs == unscored.logprobs == of_output(1)
