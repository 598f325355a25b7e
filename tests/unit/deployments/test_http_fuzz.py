"""Bodies of every shape: always an answer, never a 5xx or an exception, nothing left open."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from deployments.http_app import build_app
from deployments.openai.schema import ChatBody, CompletionBody
from tests.fakes.backend import tokens_then_end
from tests.fakes.front import MODEL, ids_of, make_codec, make_front

PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
FIELDS = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields}
    | {"tools", "response_format", "user", "best_of", "x"}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e400, -1e400, float("nan")])
    | st.text(max_size=6)
    | st.sampled_from(["\ud800", "\U0001f600", "<|end|>", MODEL])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
odd_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": values},
        optional={"tool_calls": values, "name": values, "tool_call_id": values},
    ),
    max_size=3,
)
odd_fields = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=2) | st.builds(
    lambda messages: {"messages": messages}, odd_messages
)
short = st.text(min_size=1, max_size=4)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 20),
        "stop": short | st.lists(short, max_size=3),
        "stream": st.booleans(),
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 2) | st.integers(0, 2),
        "top_p": st.floats(0.01, 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "prompt_logprobs": st.integers(0, 20),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.integers(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(
            st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3
        ),
    },
)
prompts = (
    short | st.lists(short, min_size=1, max_size=3) | st.lists(st.integers(0, 300), min_size=1)
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=6)}
    ),
    min_size=1,
    max_size=3,
)
good_requests = st.one_of(
    st.tuples(
        st.just("/v1/completions"),
        st.builds(
            lambda prompt, more, own: {"model": MODEL, "prompt": prompt, **more, **own},
            prompts,
            wishes,
            st.fixed_dictionaries(
                {}, optional={"logprobs": st.integers(0, 5), "echo": st.booleans()}
            ),
        ),
    ),
    st.tuples(
        st.just("/v1/chat/completions"),
        st.builds(
            lambda turns, more, own: {"model": MODEL, "messages": turns, **more, **own},
            messages,
            wishes,
            st.just({})
            | st.builds(
                lambda number: {"logprobs": True, "top_logprobs": number}, st.integers(0, 20)
            ),
        ),
    ),
)


@pytest.fixture(scope="module")
def served():
    codec = make_codec()
    token_ids = ids_of("some text \uc548\ub155 \U0001f600")
    front, backend = make_front(tokens_then_end(token_ids), codec=codec)
    return build_app(front), backend


def check(served, path: str, content: bytes) -> int:
    """Send a body; the answer must be a success or a refusal in the API's shape."""
    app, backend = served

    async def send() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=content, headers=headers)
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.json()["error"]["message"]
        elif "event-stream" in response.headers["content-type"]:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"]
        event(f"status {response.status_code}")
        return response.status_code

    status = asyncio.run(send())
    assert backend.num_open == 0
    return status


fuzz = settings(
    max_examples=80,
    deadline=None,  # the machine may be busy
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzz
@given(request=good_requests)
def test_every_valid_body_is_served(served, caplog, request):
    caplog.set_level(logging.ERROR)
    path, body = request
    assert check(served, path, json.dumps(body).encode()) == 200
    assert not caplog.records


@fuzz
@given(request=good_requests, odd=odd_fields)
def test_no_field_is_too_odd_to_be_answered(served, caplog, request, odd):
    caplog.set_level(logging.ERROR)
    path, body = request
    check(served, path, json.dumps({**body, **odd}).encode())
    assert not caplog.records


@fuzz
@given(path=PATHS, content=st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode()))
def test_no_bytes_are_too_odd_to_be_refused(served, caplog, path, content):
    caplog.set_level(logging.ERROR)
    check(served, path, content)
    assert not caplog.records


@fuzz
@given(request=good_requests, position=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_byte_changed_anywhere_is_answered(served, caplog, request, position, byte):
    caplog.set_level(logging.ERROR)
    path, body = request
    content = bytearray(json.dumps(body, ensure_ascii=False).encode())
    content[position % len(content)] = byte
    check(served, path, bytes(content))
    assert not caplog.records
