"""Who knows the secret gets in, under its own name; nobody else does, with whatever it has seen."""

from __future__ import annotations

import copy
import pickle
from itertools import count

import pytest

from kv_transfer.authentication import (
    CHALLENGE_BYTES,
    MIN_SECRET_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    Initiator,
    Purpose,
    Responder,
    Secret,
)
from kv_transfer.transport import LinkRefusedError, NotAuthenticatedError

SECRET = Secret("a secret of this deployment, which is long")
OTHER = Secret("a secret of that deployment, which is long")


def responder(secret: Secret = SECRET, *, purpose=Purpose.KV_LINK, me="prefill") -> Responder:
    return Responder(secret=secret, purpose=purpose, me=me)


def initiator(
    secret: Secret = SECRET, *, purpose=Purpose.KV_LINK, me="decode", peer="prefill"
) -> Initiator:
    return Initiator(secret=secret, purpose=purpose, me=me, peer=peer)


def test_two_who_know_the_secret_admit_each_other():
    server, client = responder(), initiator()

    answer = client.answer(server.challenge)
    admitted = server.admit(answer.response)

    answer.check(admitted.proof)
    admitted.check_name("decode")


def test_messages_have_the_sizes_that_are_read():
    server = responder()
    answer = initiator().answer(server.challenge)
    proof = server.admit(answer.response).proof

    sizes = [len(server.challenge), len(answer.response), len(proof)]
    assert sizes == [CHALLENGE_BYTES, RESPONSE_BYTES, PROOF_BYTES]


@pytest.mark.parametrize(
    "stranger",
    [initiator(OTHER), initiator(purpose=Purpose.TOKEN_CHANNEL)],
    ids=["another secret", "another purpose"],
)
def test_a_responder_admits_nobody_else(stranger):
    server = responder()

    with pytest.raises(NotAuthenticatedError, match="does not know the deployment's secret"):
        server.admit(stranger.answer(server.challenge).response)


def test_an_initiator_sends_nothing_to_another_process_than_it_wants():
    with pytest.raises(NotAuthenticatedError, match="not prefill"):
        initiator(peer="prefill").answer(responder(me="a restarted prefill").challenge)


def test_an_initiator_accepts_no_proof_of_another_secret():
    """Somebody at the right address, under the right name, who accepts whatever comes."""
    impostor = responder(OTHER)
    answer = initiator().answer(impostor.challenge)
    own = initiator(OTHER).answer(impostor.challenge)

    with pytest.raises(NotAuthenticatedError, match="does not know the deployment's secret"):
        answer.check(impostor.admit(own.response).proof)


def test_a_recorded_response_is_worth_nothing_at_the_next_connection():
    first, second = responder(), responder()
    recorded = initiator().answer(first.challenge).response
    first.admit(recorded)

    with pytest.raises(NotAuthenticatedError):
        second.admit(recorded)


def test_a_recorded_proof_is_worth_nothing_to_the_next_initiator():
    server = responder()
    proof = server.admit(initiator().answer(server.challenge).response).proof

    with pytest.raises(NotAuthenticatedError):
        initiator().answer(server.challenge).check(proof)


def test_a_proof_sent_back_proves_nothing():
    """Reflection, both ways, between two who have one name."""
    server, client = responder(me="same"), initiator(me="same", peer="same")
    answer = client.answer(server.challenge)

    with pytest.raises(NotAuthenticatedError):
        answer.check(answer.response[-PROOF_BYTES:])
    with pytest.raises(NotAuthenticatedError):
        server.admit(server.challenge + bytes(PROOF_BYTES))
    proof = server.admit(answer.response).proof
    with pytest.raises(NotAuthenticatedError):
        server.admit(answer.response[:-PROOF_BYTES] + proof)


def test_a_response_meant_for_another_responder_is_refused():
    """Who is connected to cannot pass the response on to a third process of the deployment."""
    near, far = responder(me="near"), responder(me="far")
    relayed = near.challenge[:40] + far.challenge[40:]
    assert len(relayed) == CHALLENGE_BYTES

    with pytest.raises(NotAuthenticatedError):
        far.admit(initiator(peer="near").answer(near.challenge).response)
    with pytest.raises(NotAuthenticatedError):
        initiator(peer="near").answer(relayed)


def test_what_carries_the_connection_is_part_of_the_proofs():
    """Who sits between two TLS connections shows the two ends different certificates."""
    server = Responder(secret=SECRET, purpose=Purpose.KV_LINK, me="prefill", channel=b"ours")
    client = Initiator(
        secret=SECRET, purpose=Purpose.KV_LINK, me="decode", peer="prefill", channel=b"its own"
    )
    with pytest.raises(NotAuthenticatedError):
        server.admit(client.answer(server.challenge).response)


def test_another_name_than_the_proved_one_is_refused():
    server = responder()
    admitted = server.admit(initiator(me="decode").answer(server.challenge).response)

    with pytest.raises(NotAuthenticatedError, match="another name than prefill-7"):
        admitted.check_name("prefill-7")


def test_whoever_speaks_something_else_is_refused():
    server = responder()
    response = initiator().answer(server.challenge).response

    for message in (b"", response[:-1], response + b"\0", b"GET / HT" + response[8:]):
        with pytest.raises(NotAuthenticatedError, match="version of Baton"):
            server.admit(message)
    with pytest.raises(NotAuthenticatedError, match="version of Baton"):
        initiator().answer(b"SSH-2.0-" + server.challenge[8:])


def test_each_connection_has_a_challenge_of_its_own():
    assert len({responder().challenge for _ in range(100)}) == 100


def test_each_response_has_a_nonce_of_its_own():
    server = responder()
    assert len({initiator().answer(server.challenge).response for _ in range(100)}) == 100


def test_random_bytes_come_from_whoever_is_given():
    numbers = count(1)

    def draw(size: int) -> bytes:
        return next(numbers).to_bytes(size)

    server = Responder(secret=SECRET, purpose=Purpose.KV_LINK, me="a", random_bytes=draw)
    client = Initiator(secret=SECRET, purpose=Purpose.KV_LINK, me="b", peer="a", random_bytes=draw)

    response = client.answer(server.challenge).response

    assert (server.challenge[8:40], response[8:40]) == ((1).to_bytes(32), (2).to_bytes(32))


def test_a_refusal_is_a_refused_link():
    assert issubclass(NotAuthenticatedError, LinkRefusedError)


def test_a_short_secret_is_refused_without_being_shown():
    with pytest.raises(ValueError, match="at least 32 bytes, this one has 7") as refused:
        Secret("  hunter2\n")
    assert "hunter2" not in str(refused.value)
    Secret("x" * MIN_SECRET_BYTES)


def test_space_around_a_secret_does_not_count():
    """A file that an editor or `echo` wrote ends with a new line."""
    text = SECRET.reveal()
    assert Secret(f" {text}\n").key(b"a") == SECRET.key(b"a")


def test_a_secret_may_be_of_any_bytes_but_is_not_filled_up():
    """As `os.environ` gives bytes that are no UTF-8; HMAC alone takes zeros at the end for none."""
    text = b"\xff".decode(errors="surrogateescape") * MIN_SECRET_BYTES
    assert Secret(Secret(text).reveal()).key() == Secret(text).key()
    assert Secret(SECRET.reveal() + "\0").key() != SECRET.key()


def test_a_name_that_is_no_text_is_only_another_name():
    server = responder()
    admitted = server.admit(initiator().answer(server.challenge).response)
    with pytest.raises(NotAuthenticatedError):
        admitted.check_name("\ud800")


def test_a_secret_shows_itself_in_no_text():
    texts = [repr(SECRET), str(SECRET), f"{SECRET}", repr(responder()), repr(initiator())]
    assert not any(SECRET.reveal() in text for text in texts)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secret_is_not_pickled(duplicate):
    with pytest.raises(TypeError, match="not to be pickled"):
        duplicate(SECRET)


def test_fresh_secrets_differ_and_can_be_handed_on():
    fresh = Secret.fresh()

    assert Secret(fresh.reveal()).key() == fresh.key()
    assert Secret.fresh().key() != fresh.key()


def test_keys_for_different_uses_differ():
    uses = [(), (b"a",), (b"b",), (b"a", b"b"), (b"b", b"a"), (b"ab",), (b"", b"ab")]
    assert len({SECRET.key(*use) for use in uses}) == len(uses)
