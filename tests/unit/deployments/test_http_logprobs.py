"""Log-probabilities and echo as clients get them, streamed or not, by the official client."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from tests.fakes.backend import made_up, tokens_then_end
from tests.fakes.front import EOS, MODEL, client_of, ids_of, make_codec, make_front
from workers.messages import FinishReason

ANSWER = "Hello \uc548\ub155 \U0001f600 END of it"
PROMPT = "the quick \uc138\uacc4"
COMPLETION: Any = {"model": MODEL, "prompt": PROMPT}
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def codec():
    return make_codec()


@pytest.fixture
def served(codec):
    return make_front(tokens_then_end(ids_of(ANSWER), FinishReason.STOP), codec=codec)


@pytest.fixture
async def official(served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        client_of(served[0]) as http,
        openai.AsyncOpenAI(
            api_key="none", base_url="http://front/v1", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


async def completion(official, **fields) -> list[tuple[Any, Any]]:
    """Each choice's text and log-probabilities, whole; a stream must join to the same."""
    whole = await official.completions.create(**COMPLETION, **fields)
    joined: dict[int, tuple[str, dict[str, list]]] = {}
    reasons: dict[int, str] = {}
    async for chunk in await official.completions.create(**COMPLETION, stream=True, **fields):
        (choice,) = chunk.choices
        text, lists = joined.get(choice.index, ("", {}))
        for name, items in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
            lists = {**lists, name: [*lists.get(name, []), *items]}
        joined[choice.index] = (text + choice.text, lists)
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        lists = choice.logprobs.to_dict() if choice.logprobs else {}
        assert joined[choice.index] == (choice.text, lists)
        assert reasons[choice.index] == choice.finish_reason  # row 54
    return [(choice.text, choice.logprobs) for choice in whole.choices]


async def test_a_completions_tokens_are_its_text(official):
    ((text, logprobs),) = await completion(official, logprobs=2)
    token_ids = ids_of(ANSWER)
    assert text == ANSWER
    assert logprobs.token_logprobs == [made_up(each, 2).logprob for each in token_ids]
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(token_ids)
    # The token itself is the second likeliest of what the fake makes up.
    assert all(
        len(top) == 2 and top[token] == logprob
        for top, token, logprob in zip(
            logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs, strict=True
        )
    )


async def test_a_completions_tokens_can_be_named_by_their_ids(official):
    fields: Any = {"logprobs": 0, "extra_body": {"return_tokens_as_token_ids": True}}
    ((text, logprobs),) = await completion(official, **fields)
    assert text == ANSWER
    assert logprobs.tokens == [f"token_id:{each}" for each in ids_of(ANSWER)]


async def test_text_offsets_count_from_the_start_of_the_prompt(official):
    """Row 61."""
    ((text, logprobs),) = await completion(official, logprobs=0)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or (PROMPT + text)[offset:].startswith(token)
    assert logprobs.text_offset[0] == len(PROMPT)


async def test_a_stop_string_leaves_its_tokens_out(official):
    ((text, logprobs),) = await completion(official, logprobs=0, stop=["END"])
    assert text == ANSWER.partition("END")[0]
    assert len(logprobs.tokens) == len(ids_of(text))


async def test_every_choice_has_its_own(official):
    choices = await completion(official, logprobs=1, n=3)
    assert [text for text, _ in choices] == [ANSWER] * 3
    assert {len(logprobs.tokens) for _, logprobs in choices} == {len(ids_of(ANSWER))}


@pytest.mark.parametrize("prompt", [PROMPT, list(ids_of(PROMPT))])
async def test_an_echo_is_the_prompt_then_the_answer(official, prompt):
    """Row 62."""
    whole = await official.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1)
    (choice,) = whole.choices
    entries = [*ids_of(PROMPT), *ids_of(ANSWER)]
    assert choice.text == PROMPT + ANSWER
    assert len(choice.logprobs.tokens) == len(entries)
    assert choice.logprobs.token_logprobs == [
        None, *[made_up(each, 1).logprob for each in entries[1:]]
    ]  # fmt: skip
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[0] == 0
    assert whole.usage.completion_tokens == len(ids_of(ANSWER))


async def test_an_echo_streams_to_the_same(official):
    ((text, logprobs),) = await completion(official, echo=True, logprobs=3, stop=["END"])
    assert text == PROMPT + ANSWER.partition("END")[0]
    assert "".join(token for token in logprobs.tokens if "bytes" not in token)


async def test_an_echo_does_not_need_log_probabilities(official):
    ((text, logprobs),) = await completion(official, echo=True)
    assert text == PROMPT + ANSWER
    assert logprobs is None


async def test_an_echo_without_output_scores_the_prompt(official, served):
    """Row 43."""
    fields: Any = {"echo": True, "max_tokens": 0, "logprobs": 5}
    ((text, logprobs),) = await completion(official, **fields)
    usage = (await official.completions.create(**COMPLETION, **fields)).usage
    assert text == PROMPT
    assert len(logprobs.tokens) == len(ids_of(PROMPT))
    assert [each is None for each in logprobs.token_logprobs].count(True) == 1
    assert usage.completion_tokens == 0
    assert served[1].num_open == 0


async def test_prompts_of_a_list_have_their_own_log_probabilities(official):
    prompts = [PROMPT, "dog"]
    answer = await official.completions.create(
        model=MODEL, prompt=prompts, echo=True, max_tokens=0, logprobs=0
    )
    assert [choice.text for choice in answer.choices] == prompts
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [
        len(ids_of(prompt)) for prompt in prompts
    ]


@pytest.mark.parametrize("number", [0, 3])
async def test_a_chats_tokens_are_its_text(official, number):
    """Rows 66, 68 and 71: one entry a token, with its own alternatives; as many as asked."""
    fields: Any = {**CHAT, "logprobs": True, "top_logprobs": number}
    (choice,) = (await official.chat.completions.create(**fields)).choices
    content, streamed, reasons = choice.logprobs.content, [], []
    async for chunk in await official.chat.completions.create(**fields, stream=True):
        (part,) = chunk.choices
        if part.logprobs is not None:
            assert part.delta.content is not None
            streamed += part.logprobs.content
        reasons.append(part.finish_reason)
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == ANSWER
    assert {len(entry.top_logprobs) for entry in content} == {number}
    assert streamed == content
    assert reasons[-1] == choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chats_tokens_can_be_named_by_their_ids(served, stream):
    async with client_of(served[0]) as client:
        wishes = {"logprobs": True, "return_tokens_as_token_ids": True, "stream": stream}
        response = await client.post("/v1/chat/completions", json={**CHAT, **wishes})
    named = re.findall(r'"token":"token_id:(\d+)"', response.text)
    assert tuple(map(int, named)) == ids_of(ANSWER)


async def test_a_chat_without_tokens_has_an_empty_list(codec):
    front, _ = make_front(tokens_then_end((), FinishReason.STOP), codec=codec)
    async with client_of(front) as client:
        body = (await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True})).json()
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
async def test_prompt_log_probabilities_come_once(served, path, body, stream):
    async with client_of(served[0]) as client:
        wishes = {"prompt_logprobs": 2, "stream": stream}
        response = await client.post(f"/v1/{path}", json={**body, **wishes})
    assert response.text.count('"prompt_logprobs":') == 1
    if stream:
        return
    answer = response.json()
    shown = answer if path.startswith("chat") else answer["choices"][0]
    first, *others = shown["prompt_logprobs"]
    prompt_ids = served[1].requests[0].prompt_token_ids
    assert first is None
    assert len(others) == len(prompt_ids) - 1
    for token_id, entry in zip(prompt_ids[1:], others, strict=True):
        assert entry[str(token_id)]["logprob"] == made_up(token_id, 2).logprob
        assert entry[str(token_id)]["rank"] == 2
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_the_reason_names_a_clients_stop_token(codec, stream):
    def script(stop_token_id, request):
        *frames, end = tokens_then_end(ids_of("a b"), FinishReason.STOP)(request)
        return [*frames, replace(end, stop_token_id=stop_token_id)]

    for stop_token_id, expected in ((7, "7"), (EOS, "null")):
        front, _ = make_front(partial(script, stop_token_id), codec=codec)
        async with client_of(front) as client:
            body = {**COMPLETION, "stop_token_ids": [7], "stream": stream}
            response = await client.post("/v1/completions", json=body)
        assert f'"stop_reason":{expected}' in response.text
