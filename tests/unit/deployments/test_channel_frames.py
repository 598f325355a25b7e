"""Frames come out as they went in, and what is no frame is refused before it costs anything."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import pytest

from deployments.channel.frames import (
    MAX_BODY_BYTES,
    BrokenFrameError,
    Cancel,
    Credit,
    Events,
    FrameBuffer,
    Open,
    encode_frame,
    pieces,
)
from kv_transfer.logprobs import TokenLogprobs
from tests.fakes.channel import request, wire
from workers.engine.sampling_params import SamplingParams
from workers.messages import (
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    PromptFrame,
    TokenFrame,
    WorkerLoad,
)

SCORE = TokenLogprobs(logprob=-1.5, rank=2, top=((4, -0.25), (5, float("-inf"))))
EVENTS = (
    TokenFrame(attempt=1, token_ids=(5, 6), logprobs=(SCORE, SCORE), cached_tokens=16),
    PromptFrame(attempt=0, logprobs=(SCORE,)),
    Finished(
        attempt=0,
        reason=FinishReason.STOP,
        prompt_tokens=1,
        completion_tokens=2,
        prefilled_by="prefill-0",
        stop_token_id=2,
    ),
    Failed(attempt=3, code=FailureCode.QUEUE_FULL, message="full", retry_after_s=1.0),
    Heartbeat(attempt=0, worker="w"),
)
LOAD = WorkerLoad(takes_requests=True, requests=3, waiting=1, available_blocks=7, is_leaving=True)
FULL_REQUEST = GenerateRequest(
    request_id="r-0",
    prompt_token_ids=(0, 2**31),
    sampling=SamplingParams(
        max_tokens=5,
        temperature=0.5,
        seed=2**64 - 1,
        logit_bias=((1, -100.0),),
        logprobs=0,
        stop_token_ids=frozenset({1, 2}),
    ),
    priority=-(2**31),
    attempt=2,
    timeout_s=1.5,
    cache_salt="tenant é",
    resumed_token_ids=(9,),
    avoid=("a", "b"),
)
FRAMES = [
    Open(call=0, request=FULL_REQUEST),
    Cancel(call=7),
    Credit(call=7, events=32),
    Events(),
    Events(load=LOAD),
    Events(events=tuple(enumerate(EVENTS)), load=LOAD),
]
HEADER = struct.Struct("!IB")


def raw(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind) + body


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_out_as_it_went_in(frame):
    assert FrameBuffer().feed(encode_frame(frame)) == [frame]


def test_several_frames_in_one_piece_come_out_in_order():
    assert FrameBuffer().feed(wire(*FRAMES)) == FRAMES


def test_a_frame_in_two_pieces_comes_out_with_the_second():
    buffer, encoded = FrameBuffer(), wire(*FRAMES)
    assert buffer.feed(encoded[:-1]) == FRAMES[:-1]
    assert buffer.feed(encoded[-1:]) == FRAMES[-1:]


EVENT_OF_UNKNOWN_KIND = msgspec.msgpack.encode((None, [(0, 5, {})]))
EVENT_OF_NEGATIVE_KIND = msgspec.msgpack.encode((None, [(0, -1, {})]))
EVENT_WITH_WRONG_FIELD = msgspec.msgpack.encode((None, [(0, 0, {"attempt": "x", "token_ids": []})]))
CALL_THAT_IS_TEXT = msgspec.msgpack.encode({"call": "1"})


@pytest.mark.parametrize(
    "garbage",
    [
        raw(0, b""),
        raw(5, b""),
        raw(2, b""),
        raw(2, b"\xc1"),
        raw(2, CALL_THAT_IS_TEXT),
        raw(2, encode_frame(Cancel(call=1))[HEADER.size :] + b"\x00"),
        raw(1, encode_frame(Cancel(call=1))[HEADER.size :]),
        raw(4, EVENT_OF_UNKNOWN_KIND),
        raw(4, EVENT_OF_NEGATIVE_KIND),
        raw(4, EVENT_WITH_WRONG_FIELD),
        raw(4, b"\x91" * 100_000),
    ],
)
def test_what_is_no_frame_is_refused(garbage):
    with pytest.raises(BrokenFrameError):
        FrameBuffer().feed(garbage)


@pytest.mark.parametrize(("length", "kind"), [(MAX_BODY_BYTES + 1, 2), (0, 77)])
def test_a_header_alone_is_enough_to_refuse(length, kind):
    with pytest.raises(BrokenFrameError):
        FrameBuffer().feed(HEADER.pack(length, kind))


def test_a_frame_above_the_bound_is_not_sent():
    asked = replace(request(), cache_salt="x" * MAX_BODY_BYTES)
    with pytest.raises(ValueError, match="at most"):
        encode_frame(Open(call=0, request=asked))


def test_scores_of_a_long_prompt_go_in_pieces_that_say_the_same():
    scores = tuple(replace(SCORE, rank=rank) for rank in range(1, 301))
    parts = list(pieces(PromptFrame(attempt=4, logprobs=scores)))
    assert [len(part.logprobs) for part in parts] == [128, 128, 44]
    assert tuple(score for part in parts for score in part.logprobs) == scores
    assert {part.attempt for part in parts} == {4}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_other_event_is_one_piece(event):
    assert list(pieces(event)) == [event]
