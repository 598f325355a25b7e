"""Chunks and bodies of both dialects, made from the same deltas."""

from __future__ import annotations

import json

import pytest

from deployments.openai.answer import Delta, Ending, Usage
from deployments.openai.errors import InvalidRequestError
from deployments.openai.stream import (
    KEEP_ALIVE,
    ChatDialect,
    CompletionDialect,
    StreamEncoder,
    collect,
    to_json,
)

HEAD = {"id": "x-1", "created": 5, "model": "m"}
DELTAS = [
    Delta(index=1, text="b", completion_tokens=1),
    Delta(index=0, text="", completion_tokens=1),
    Delta(index=0, text="\uac00", completion_tokens=2),
    Delta(index=1, text="", completion_tokens=3, ending=Ending(finish_reason="length")),
    Delta(
        index=0,
        text="c",
        completion_tokens=4,
        ending=Ending(finish_reason="stop", stop_reason="END"),
    ),
]
USAGE = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=8)


def stream(dialect, *, include_usage=False, continuous_usage=False) -> list:
    encoder = StreamEncoder(
        dialect,
        prompt_tokens=10,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )
    data = b"".join(map(encoder.delta, DELTAS)) + encoder.done(USAGE)
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.count("data: [DONE]") == 1
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_chat_stream_begins_each_choice_with_the_role():
    chunks = stream(ChatDialect(**HEAD))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all({key: chunk[key] for key in HEAD} == HEAD for chunk in chunks)
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    opening = {"role": "assistant", "content": ""}
    assert seen == [
        (1, opening),
        (1, {"content": "b"}),
        (0, opening),
        (0, {"content": "\uac00"}),
        (1, {}),
        (0, {"content": "c"}),
        (0, {}),
    ]


@pytest.mark.parametrize("dialect", [ChatDialect(**HEAD), CompletionDialect(**HEAD)])
def test_the_finish_reason_is_null_until_a_choices_last_chunk(dialect):
    """Rows 39 and 40: the key is always there, its last value is of the set."""
    reasons: dict[int, list] = {0: [], 1: []}
    for chunk in stream(dialect):
        (choice,) = chunk["choices"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert all(reason is None for each in reasons.values() for reason in each[:-1])
    assert (reasons[0][-1], reasons[1][-1]) == ("stop", "length")


def test_usage_is_one_last_chunk_without_choices():
    """Row 56."""
    *chunks, last = stream(CompletionDialect(**HEAD), include_usage=True)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert all("usage" not in chunk for chunk in stream(CompletionDialect(**HEAD)))


def test_continuous_usage_rises_to_the_total():
    """Row 57."""
    chunks = stream(ChatDialect(**HEAD), include_usage=True, continuous_usage=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [7, 7]
    assert all(chunk["usage"]["prompt_tokens"] == 10 for chunk in chunks)
    assert "usage" in stream(ChatDialect(**HEAD), continuous_usage=True)[0]


@pytest.mark.parametrize("dialect", [ChatDialect(**HEAD), CompletionDialect(**HEAD)])
def test_the_body_is_what_the_stream_is_joined_to(dialect):
    body = json.loads(collect(dialect, DELTAS, USAGE))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in stream(dialect):
        (choice,) = chunk["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] += text
    for choice in body["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == texts[choice["index"]]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "END"
    assert body["usage"]["total_tokens"] == 17


def test_unknown_cached_tokens_are_null_not_zero():
    body = json.loads(collect(ChatDialect(**HEAD), [], Usage(prompt_tokens=1, completion_tokens=0)))
    assert body["usage"]["prompt_tokens_details"] is None


def test_an_error_is_a_data_line():
    encoder = StreamEncoder(
        ChatDialect(**HEAD), prompt_tokens=1, include_usage=False, continuous_usage=False
    )
    line = encoder.error(InvalidRequestError("bad", param="p")).decode()
    assert line.startswith("data: ")
    assert line.endswith("\n\n")
    assert json.loads(line.removeprefix("data: "))["error"]["param"] == "p"


def test_json_is_always_valid_utf_8():
    assert to_json({"a": "\ud800\uac00"}) == '{"a":"\\ud800\uac00"}'.encode()
    assert KEEP_ALIVE.startswith(b":")
