"""Whatever is said, changed, left out or put in another order, only the next answer opens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.authentication import Purpose, Secret
from kv_transfer.sealing import OpenedCall, SealedCall
from kv_transfer.transport import NotAuthenticatedError

SECRETS = st.sampled_from([Secret("one secret that both know" * 2), Secret("another secret " * 3)])
PURPOSES = st.sampled_from(Purpose)
BODIES = st.lists(st.binary(max_size=40), max_size=5)


@given(secret=SECRETS, purpose=PURPOSES, body=st.binary(max_size=200), answers=BODIES)
def test_any_words_come_as_they_were_said(secret, purpose, body, answers):
    call = SealedCall(secret, purpose, body)
    opened = OpenedCall(secret, purpose, call.message)

    assert opened.body == body
    assert [call.open(opened.seal(answer)) for answer in answers] == answers


@given(ours=SECRETS, theirs=SECRETS, purpose=PURPOSES, other=PURPOSES, body=st.binary(max_size=40))
def test_who_differs_in_secret_or_purpose_is_refused(ours, theirs, purpose, other, body):
    message = SealedCall(theirs, other, body).message
    if (ours, purpose) == (theirs, other):
        assert OpenedCall(ours, purpose, message).body == body
        return
    with pytest.raises(NotAuthenticatedError):
        OpenedCall(ours, purpose, message)


@given(message=st.binary(max_size=200), keeps_preamble=st.booleans())
def test_no_garbage_opens(message, keeps_preamble):
    secret = Secret("one secret that both know" * 2)
    call = SealedCall(secret, Purpose.PREFILL_CALL, b"")
    if keeps_preamble:
        message = call.message[:8] + message

    with pytest.raises(NotAuthenticatedError):
        OpenedCall(secret, Purpose.PREFILL_CALL, message)
    with pytest.raises(NotAuthenticatedError):
        call.open(message)


@given(bodies=BODIES, data=st.data())
def test_of_all_answers_to_all_calls_only_the_next_one_opens(bodies, data):
    """An attacker has two calls, and every answer that two workers gave to each."""
    secret = Secret("one secret that both know" * 2)
    calls = [SealedCall(secret, Purpose.PREFILL_CALL, b"same") for _ in range(2)]
    workers = [
        OpenedCall(secret, Purpose.PREFILL_CALL, call.message) for call in calls for _ in range(2)
    ]
    answers = [
        [worker.seal(bytes([number]) + body) for body in bodies]
        for number, worker in enumerate(workers)
    ]
    every = [answer for of_worker in answers for answer in of_worker]
    if not every:
        return
    chosen = data.draw(st.lists(st.sampled_from(every), max_size=8))

    heard: list[bytes] = []
    for answer in chosen:
        heard.append(answer)
        if any(of_worker[: len(heard)] == heard for of_worker in answers[:2]):
            calls[0].open(answer)
        else:
            heard.pop()
            with pytest.raises(NotAuthenticatedError):
                calls[0].open(answer)
