"""A sealed call and its answers open for who knows the secret, once each and in order."""

from __future__ import annotations

import pickle

import pytest

from kv_transfer.authentication import Initiator, Purpose, Responder, Secret
from kv_transfer.sealing import REFUSAL, OpenedCall, SealedCall
from kv_transfer.transport import NotAuthenticatedError

SECRET = Secret("a secret of this deployment, which is long")
OTHER = Secret("a secret of that deployment, which is long")
PURPOSE = Purpose.PREFILL_CALL


def sealed(body: bytes = b"a call", *, secret: Secret = SECRET, purpose=PURPOSE) -> SealedCall:
    return SealedCall(secret, purpose, body)


def opened(message: object) -> OpenedCall:
    return OpenedCall(SECRET, PURPOSE, message)


def flipped(message: bytes, bit: int) -> bytes:
    return (int.from_bytes(message) ^ (1 << bit)).to_bytes(len(message))


@pytest.mark.parametrize("bodies", [[], [b""], [b"accepted", b"ended"], [b"same", b"same"]])
def test_a_call_and_its_answers_come_as_they_were_said(bodies):
    call = sealed()
    answering = opened(call.message)

    assert (answering.message, answering.body) == (call.message, b"a call")
    assert [call.open(answering.seal(body)) for body in bodies] == bodies


@pytest.mark.parametrize(
    "stranger",
    [sealed(secret=OTHER), sealed(purpose=Purpose.KV_LINK)],
    ids=["another secret", "another purpose"],
)
def test_a_call_of_anybody_else_is_refused(stranger):
    with pytest.raises(NotAuthenticatedError, match="does not know the deployment's secret"):
        opened(stranger.message)


@pytest.mark.parametrize("body", [b"", b"a call"])
def test_a_call_with_any_bit_changed_is_refused(body):
    message = sealed(body).message
    for bit in range(8 * len(message)):
        with pytest.raises(NotAuthenticatedError):
            opened(flipped(message, bit))


def test_an_answer_with_any_bit_changed_is_refused_and_the_right_one_still_opens():
    call = sealed()
    answer = opened(call.message).seal(b"accepted")
    for bit in range(8 * len(answer)):
        with pytest.raises(NotAuthenticatedError):
            call.open(flipped(answer, bit))

    assert call.open(answer) == b"accepted"


def test_what_is_cut_or_longer_is_refused():
    call = sealed()
    answer = opened(call.message).seal(b"accepted")

    for size in range(len(call.message)):
        with pytest.raises(NotAuthenticatedError):
            opened(call.message[:size])
    for size in range(len(answer)):
        with pytest.raises(NotAuthenticatedError):
            call.open(answer[:size])
    with pytest.raises(NotAuthenticatedError):
        opened(call.message + b"\0")
    with pytest.raises(NotAuthenticatedError):
        call.open(answer + b"\0")


class Loads:
    """Fails the test where anybody unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("message", [None, "text", 7, [b"list"], b"plain", pickle.dumps(Loads())])
def test_what_is_not_sealed_is_refused_unread(message):
    with pytest.raises(NotAuthenticatedError, match="not sealed"):
        opened(message)
    with pytest.raises(NotAuthenticatedError, match="not sealed"):
        sealed().open(message)


@pytest.mark.parametrize("impostor", [OTHER, SECRET], ids=["another secret", "another purpose"])
def test_an_answer_of_who_was_not_asked_is_refused(impostor):
    purpose = PURPOSE if impostor is OTHER else Purpose.TOKEN_CHANNEL
    theirs = OpenedCall(impostor, purpose, sealed(secret=impostor, purpose=purpose).message)

    with pytest.raises(NotAuthenticatedError, match="does not know the deployment's secret"):
        sealed().open(theirs.seal(b"accepted"))


def test_an_answer_to_another_call_is_refused():
    """Of the same words, too: the nonce tells them apart."""
    ours, theirs = sealed(), sealed()

    with pytest.raises(NotAuthenticatedError, match="not the next answer"):
        ours.open(opened(theirs.message).seal(b"accepted"))


def test_answers_open_once_and_in_their_order():
    call = sealed()
    answering = opened(call.message)
    first, second, third = (answering.seal(body) for body in (b"same", b"same", b"other"))

    def refuses(*answers: bytes) -> None:
        for answer in answers:
            with pytest.raises(NotAuthenticatedError, match="not the next answer"):
                call.open(answer)

    refuses(second, third)
    assert call.open(first) == b"same"
    refuses(first, third)
    assert call.open(second) == b"same"
    refuses(first, second)
    assert call.open(third) == b"other"
    refuses(first, second, third)


def test_two_who_answer_one_call_cannot_be_mixed():
    """Who has recorded a call makes it at another worker as well."""
    call = sealed()
    here, there = opened(call.message), opened(call.message)
    assert call.open(here.seal(b"accepted here")) == b"accepted here"
    there.seal(b"accepted there")

    with pytest.raises(NotAuthenticatedError, match="not the next answer"):
        call.open(there.seal(b"ended"))
    assert call.open(here.seal(b"ended")) == b"ended"


def test_what_was_sealed_one_way_is_worth_nothing_in_the_other():
    call = sealed()
    answering = opened(call.message)

    with pytest.raises(NotAuthenticatedError):
        call.open(call.message)
    with pytest.raises(NotAuthenticatedError):
        opened(answering.seal(b"x" * 64))


def test_no_proof_of_a_connection_seals_a_call():
    responder = Responder(secret=SECRET, purpose=PURPOSE, me="a")
    response = Initiator(secret=SECRET, purpose=PURPOSE, me="b", peer="a").answer(
        responder.challenge
    )
    recorded = response.response[8:] + responder.admit(response.response).proof

    with pytest.raises(NotAuthenticatedError):
        opened(sealed().message[:8] + recorded)


def test_a_recorded_call_opens_again():
    """Known, and said in docs/kv-handoff.md: what a call is about tells it from another."""
    message = sealed().message
    assert opened(message).body == opened(message).body


def test_a_refusal_opens_as_nothing_and_says_so():
    with pytest.raises(NotAuthenticatedError, match="who answers says that this call is not"):
        sealed().open(REFUSAL)
    with pytest.raises(NotAuthenticatedError):
        opened(REFUSAL)


def test_nonces_are_fresh_and_come_from_whoever_is_given():
    assert len({sealed().message for _ in range(100)}) == 100
    call = SealedCall(SECRET, PURPOSE, b"", random_bytes=lambda size: b"r" * size)
    assert call.message[8:40] == b"r" * 32
