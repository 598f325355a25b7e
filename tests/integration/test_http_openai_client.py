"""The official client, as its users run it, against a real server: answers and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.tools.baton_server import MODEL, WINDOW, BatonServer

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "Once upon a time, in a village by the sea,"
MESSAGES: Any = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Name three colours."},
]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 16}
SAMPLED: Any = {"model": MODEL, "temperature": 1, "max_tokens": 16, "seed": 7}
WITH_USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def client(baton_server: BatonServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton_server.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(baton_server: BatonServer) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"{baton_server.base_url}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_streamed_completion_is_the_whole_one(client):
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    *chunks, last = client.completions.create(prompt=PROMPT, **GREEDY, **WITH_USAGE)

    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text != ""
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {last.id}


def test_a_streamed_chat_is_the_whole_one(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    *chunks, last = client.chat.completions.create(messages=MESSAGES, **GREEDY, **WITH_USAGE)

    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        choice.finish_reason
    ]
    # Of the second request's prompt some may be cached, of the first one's too.
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


async def test_the_async_client_gets_the_same_completion(client, async_client):
    expected = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text

    whole = await async_client.completions.create(prompt=PROMPT, **GREEDY)
    stream = await async_client.completions.create(prompt=PROMPT, stream=True, **GREEDY)

    assert whole.choices[0].text == expected
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected


async def test_the_async_client_gets_the_same_chat(client, async_client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    expected = whole.choices[0].message.content

    again = await async_client.chat.completions.create(messages=MESSAGES, **GREEDY)
    stream = await async_client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)

    assert again.choices[0].message.content == expected
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == expected


def test_usage_counts_the_tokens(client):
    answer = client.completions.create(prompt=[101, 102, 103, 104, 105], **GREEDY)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == 21


def test_a_seed_gives_the_same_choices_and_two_choices_differ(client):
    first = client.completions.create(prompt=PROMPT, n=2, **SAMPLED)
    second = client.completions.create(prompt=PROMPT, n=2, **SAMPLED)
    other = client.completions.create(prompt=PROMPT, n=2, **{**SAMPLED, "seed": 8})

    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert [choice.text for choice in second.choices] == texts
    assert [choice.text for choice in other.choices] != texts
    assert first.usage.completion_tokens == 32


def test_streamed_choices_are_the_whole_ones(client):
    whole = client.chat.completions.create(messages=MESSAGES, n=2, **SAMPLED)
    stream = client.chat.completions.create(messages=MESSAGES, n=2, stream=True, **SAMPLED)

    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_itself(client, stream):
    free = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = free.split()[3]
    expected = free.partition(stop)[0]

    answer = client.completions.create(prompt=PROMPT, stop=[stop], stream=stream, **GREEDY)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]

    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"


def test_an_echo_scores_the_same_tokens_in_every_shape(client):
    """The prompt is long enough to be computed by prefill, and the first token with it."""
    prompt = list(range(1000, 1200))
    fields: Any = {**GREEDY, "prompt": prompt, "logprobs": 3}

    echoed = client.completions.create(echo=True, extra_body={"prompt_logprobs": 5}, **fields)
    (choice,) = echoed.choices
    alone = client.completions.create(**fields).choices[0].logprobs
    chunks = list(client.completions.create(echo=True, stream=True, **fields))
    *_, last = client.completions.create(echo=True, **{**fields, "max_tokens": 0}).choices

    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(prompt) + 16
    assert logprobs.tokens[len(prompt) :] == alone.tokens
    assert logprobs.text_offset[len(prompt) :] == alone.text_offset
    assert logprobs.token_logprobs[len(prompt) :] == pytest.approx(alone.token_logprobs, abs=1e-4)
    assert last.logprobs.tokens == logprobs.tokens[: len(prompt)]
    assert last.logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1 : len(prompt)], abs=1e-4
    )
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    # What vLLM's field says of the prompt is what the echo says.
    for place, (entry, token_id) in enumerate(zip(choice.prompt_logprobs, prompt, strict=True)):
        if place:
            assert entry[str(token_id)]["logprob"] == logprobs.token_logprobs[place]


def test_greedy_tokens_are_the_likeliest_of_their_alternatives(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )

    content = answer.choices[0].logprobs.content
    assert len(content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 2
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text == answer.choices[0].message.content


def test_a_frequency_penalty_has_its_effect(client):
    """Rows 76 and 77."""
    fields: Any = {**GREEDY, "prompt": "la la la la la la la", "logprobs": 0}
    free = client.completions.create(**fields).choices[0].logprobs.tokens
    penalized = client.completions.create(**fields, frequency_penalty=2).choices[0].logprobs.tokens

    assert max(map(free.count, free)) > max(map(penalized.count, penalized))


def test_a_banned_token_does_not_come(client):
    """Row 79: the likeliest one, whose id the log-probabilities of a longer prompt tell."""
    prompt = list(range(2000, 2010))
    fields: Any = {**GREEDY, "logprobs": 1}
    scored = client.completions.create(
        prompt=[*prompt, 5], extra_body={"prompt_logprobs": 1}, **{**fields, "max_tokens": 1}
    )
    ranked = scored.choices[0].prompt_logprobs[-1]
    (likeliest,) = (each for each, entry in ranked.items() if entry["rank"] == 1)
    text = ranked[likeliest]["decoded_token"]

    free = client.completions.create(prompt=prompt, **fields).choices[0].logprobs
    banned = client.completions.create(prompt=prompt, logit_bias={likeliest: -100}, **fields)

    tokens = banned.choices[0].logprobs.tokens
    assert free.tokens[0] == text
    assert text not in tokens
    # The model's own distribution still has it at the top.
    assert max(banned.choices[0].logprobs.top_logprobs[0].items(), key=lambda item: item[1]) == (
        text,
        pytest.approx(free.token_logprobs[0], abs=1e-4),
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_window_is_the_clients_bad_request(client, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(prompt=[5] * (WINDOW + 1), stream=stream, **GREEDY)

    assert raised.value.status_code == 400
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logit_bias": {"49152": 5}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"no_such_parameter": 1}}, "no_such_parameter"),
    ],
)
def test_a_bad_parameter_is_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(prompt=PROMPT, **{**GREEDY, **fields})

    assert raised.value.param == param


async def test_the_async_client_raises_the_same(async_client):
    with pytest.raises(openai.BadRequestError) as raised:
        await async_client.chat.completions.create(messages=[], **GREEDY)

    assert raised.value.param == "messages"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "no-such-model"})
    assert raised.value.code == "model_not_found"

    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_a_path_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="text")


def test_a_deadline_that_passes_is_a_server_error(client):
    """The answer takes longer on any CPU; below 2.5 s, Serve's own cut is close behind Front's."""
    headers = {"x-request-timeout-seconds": "2.5"}
    long = {**GREEDY, "max_tokens": 500}
    with pytest.raises(openai.InternalServerError) as raised:
        client.completions.create(prompt=[5] * 1500, extra_headers=headers, **long)

    assert raised.value.status_code == 504
    assert raised.value.code == "deadline_exceeded"
