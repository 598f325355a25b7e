"""What the benches tell apart when they compare an answer over HTTP with the right one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from deployments.resume import ResumeConfig, ResumingBackend
from tests.fakes.backend import FakeBackend, Step, finished, scored_frames, tokens_then_end
from tests.fakes.front import MODEL, client_of, ids_of, make_codec, make_front
from tests.tools.golden import Answer
from tests.tools.hearing import TOKEN_IDS, Heard, hear
from workers.messages import Failed, FailureCode, GenerateRequest

TEXT = "thethe"
TOKENS = (*ids_of("t"), *ids_of("he"), *ids_of("the"))
OTHER_TOKENS = (*ids_of("the"), *ids_of("t"), *ids_of("he"))
RIGHT = Answer(text=TEXT, token_ids=TOKENS, num_tokens=len(TOKENS))
BODY = {"model": MODEL, "prompt": "a", "max_tokens": len(TOKENS), **TOKEN_IDS}


def losing(request: GenerateRequest) -> Iterable[Step]:
    """Each attempt but the last one makes one token and is lost."""
    rest = TOKENS[len(request.resumed_token_ids) :]
    yield replace(scored_frames(rest, 0)[0], attempt=request.attempt)
    if len(rest) > 1:
        yield Failed(attempt=request.attempt, code=FailureCode.WORKER_LOST, message="killed")
    else:
        yield finished(request, len(TOKENS))


def resuming(backend: FakeBackend) -> ResumingBackend:
    config = ResumeConfig(silence_s=30.0, answer_s=30.0, pause_s=0.0)
    return ResumingBackend(backend, config, clock=time.monotonic, on_loss=lambda _: None)


async def heard_from(script, *, stream: bool) -> tuple[Heard, FakeBackend]:
    heard = Heard()
    front, backend = make_front(script, codec=make_codec(), in_front=resuming)
    async with client_of(front) as client:
        await hear(client, {**BODY, "stream": stream}, heard, time.monotonic)
    return heard, backend


@pytest.mark.parametrize("stream", [False, True])
async def test_other_tokens_of_the_same_text_and_number_are_another_answer(stream: bool) -> None:
    right, _ = await heard_from(tokens_then_end(TOKENS), stream=stream)
    wrong, _ = await heard_from(tokens_then_end(OTHER_TOKENS), stream=stream)

    assert (wrong.text, wrong.num_tokens) == (right.text, right.num_tokens) == (TEXT, len(TOKENS))
    assert RIGHT.is_that_of(right)
    assert RIGHT.begins_as(right)
    assert not RIGHT.is_that_of(wrong)
    assert not RIGHT.begins_as(wrong)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_went_on_elsewhere_has_every_token_once(stream: bool) -> None:
    heard, backend = await heard_from(losing, stream=stream)

    assert [len(request.resumed_token_ids) for request in backend.requests] == [0, 1, 2]
    assert RIGHT.is_that_of(heard)


@pytest.mark.parametrize(
    "changed",
    [
        {"text": TEXT + "!"},
        {"num_tokens": len(TOKENS) + 1},
        {"token_ids": TOKENS[:-1]},
        {"token_ids": ()},
    ],
    ids=["text", "number", "one token less", "no tokens"],
)
def test_an_answer_is_its_text_its_tokens_and_their_number(changed) -> None:
    said = {"text": TEXT, "token_ids": TOKENS, "num_tokens": len(TOKENS), **changed}

    assert not RIGHT.is_that_of(Heard(**{**said, "token_ids": list(said["token_ids"])}))


def test_part_of_an_answer_is_its_first_tokens() -> None:
    assert RIGHT.begins_as(Heard())
    assert RIGHT.begins_as(Heard(text="the", token_ids=list(TOKENS[:2])))
    assert not RIGHT.begins_as(Heard(text="the", token_ids=list(OTHER_TOKENS[:1])))
    assert not RIGHT.begins_as(Heard(text="a", token_ids=list(TOKENS[:1])))
    assert not RIGHT.begins_as(Heard(text=TEXT, token_ids=[*TOKENS, TOKENS[0]]))
