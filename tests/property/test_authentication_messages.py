"""Whatever is changed on the wire, in whichever direction, somebody refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.authentication import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Initiator,
    Purpose,
    Responder,
    Secret,
)
from kv_transfer.transport import NotAuthenticatedError

SECRETS = st.text(min_size=32, max_size=64).filter(lambda text: len(text.strip().encode()) >= 32)
NAMES = st.text(max_size=40)
PURPOSES = st.sampled_from(Purpose)
WHOLE_RUN_BITS = 8 * (CHALLENGE_BYTES + RESPONSE_BYTES + PROOF_BYTES)


def flip(message: bytes, bit: int) -> bytes:
    """The message with one bit changed, or as it is where the bit is not one of it."""
    if not 0 <= bit < 8 * len(message):
        return message
    return (int.from_bytes(message) ^ (1 << bit)).to_bytes(len(message))


def run_damaged(initiator: Initiator, responder: Responder, bit: int) -> None:
    """One run in which one bit changes, counted over all that is said."""
    answer = initiator.answer(flip(responder.challenge, bit))
    admitted = responder.admit(flip(answer.response, bit - 8 * CHALLENGE_BYTES))
    answer.check(flip(admitted.proof, bit - 8 * (CHALLENGE_BYTES + RESPONSE_BYTES)))


@given(text=SECRETS, purpose=PURPOSES, server=NAMES, client=NAMES)
def test_any_two_with_one_secret_admit_each_other(text, purpose, server, client):
    responder = Responder(secret=Secret(text), purpose=purpose, me=server)
    initiator = Initiator(secret=Secret(text), purpose=purpose, me=client, peer=server)

    answer = initiator.answer(responder.challenge)
    admitted = responder.admit(answer.response)

    answer.check(admitted.proof)
    admitted.check_name(client)


@given(bit=st.integers(0, WHOLE_RUN_BITS - 1))
def test_one_bit_changed_anywhere_ends_the_run(bit):
    secret = Secret("one secret that both of them know")
    responder = Responder(secret=secret, purpose=Purpose.KV_LINK, me="prefill")
    initiator = Initiator(secret=secret, purpose=Purpose.KV_LINK, me="decode", peer="prefill")

    with pytest.raises(NotAuthenticatedError):
        run_damaged(initiator, responder, bit)


@given(response=st.binary(min_size=0, max_size=2 * RESPONSE_BYTES), keeps_preamble=st.booleans())
def test_no_garbage_is_a_response(response, keeps_preamble):
    responder = Responder(
        secret=Secret("one secret that both of them know"), purpose=Purpose.KV_LINK, me="prefill"
    )
    if keeps_preamble:
        response = (responder.challenge[:8] + response.ljust(RESPONSE_BYTES))[:RESPONSE_BYTES]

    with pytest.raises(NotAuthenticatedError):
        responder.admit(response)


@given(ours=SECRETS, theirs=SECRETS, purpose=PURPOSES, other=PURPOSES)
def test_who_differs_in_secret_or_purpose_is_refused(ours, theirs, purpose, other):
    responder = Responder(secret=Secret(ours), purpose=purpose, me="prefill")
    initiator = Initiator(secret=Secret(theirs), purpose=other, me="decode", peer="prefill")
    response = initiator.answer(responder.challenge).response

    if (ours.strip(), purpose) == (theirs.strip(), other):
        responder.admit(response)
    else:
        with pytest.raises(NotAuthenticatedError):
            responder.admit(response)
