"""Two processes prove to each other that they know the deployment's secret, and who they are.

A challenge-response in three passes with keyed hashes (HMAC-SHA256), as in ISO/IEC 9798-4 ("three
pass mutual authentication"), proved sound in this form by Bellare and Rogaway, "Entity
Authentication and Key Distribution" (CRYPTO '93, protocol MAP1):

    responder -> initiator   CHALLENGE   preamble, nonce R, name R
    initiator -> responder   RESPONSE    preamble, nonce I, name I, MAC(key of initiators, both)
    responder -> initiator   PROOF       MAC(key of responders, both)

A name is the digest of what the process is called; both nonces are fresh and 256 bits long. Both
proofs cover both nonces and both names, so none is worth anything in another run (replay), for
another pair, or in the other direction (reflection): the roles have keys of their own, as do the
purposes. Who connects proves first: a stranger gets nothing from a responder that it could guess a
secret by. Every message has a fixed size, so nobody reads a length from a peer that has not proved
anything, and no message holds the secret.

What it does not do: it says who is at the other end of the connection when it begins. Somebody who
sits on the wire may pass it on untouched and then change what follows; against that only TLS helps.
There `channel` is what both ends see of it (the server's certificate, as `tls-server-end-point` in
RFC 5929), and the proofs cover it: who sits between two TLS connections cannot pass them on either.

Values and functions without I/O. Over any stream, the responder's side is

    responder = Responder(secret=secret, purpose=purpose, me=name)
    send(responder.challenge)
    admitted = responder.admit(receive(RESPONSE_BYTES))
    send(admitted.proof)
    admitted.check_name(name_in_the_first_message_that_is_parsed)

and the initiator's

    initiator = Initiator(secret=secret, purpose=purpose, me=name, peer=name_of_whom_it_wants)
    answer = initiator.answer(receive(CHALLENGE_BYTES))
    send(answer.response)
    answer.check(receive(PROOF_BYTES))

each under a deadline of the caller's. A check that fails raises `NotAuthenticatedError`; the
connection must be closed then, without a word: what is wrong is told to nobody who has not proved
anything.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from kv_transfer.transport import NotAuthenticatedError

__all__ = [
    "CHALLENGE_BYTES",
    "MIN_SECRET_BYTES",
    "PROOF_BYTES",
    "RESPONSE_BYTES",
    "Admitted",
    "Answer",
    "Initiator",
    "NotAuthenticatedError",
    "Purpose",
    "RandomBytes",
    "Responder",
    "Secret",
]

MIN_SECRET_BYTES = 32
"""Of a secret's text: 128 bits where that is hexadecimal."""

_PREAMBLE = b"BatonAu\x01"
"""Says what speaks here, and in which version: a stranger is told from an impostor by it."""
_NONCE_BYTES = 32
_NAME_BYTES = 32
_MAC_BYTES = 32
CHALLENGE_BYTES = len(_PREAMBLE) + _NONCE_BYTES + _NAME_BYTES
RESPONSE_BYTES = len(_PREAMBLE) + _NONCE_BYTES + _NAME_BYTES + _MAC_BYTES
PROOF_BYTES = _MAC_BYTES

RandomBytes = Callable[[int], bytes]
"""So many unpredictable bytes, e.g. `secrets.token_bytes`."""


class Purpose(Enum):
    """What a connection or a call is for: a proof for one purpose is none for another."""

    KV_LINK = b"kv link"
    """Prefill and decode worker, for one transfer."""
    TOKEN_CHANNEL = b"token channel"
    """Front and decode worker."""
    PREFILL_CALL = b"prefill call"
    """Decode and prefill worker, for one prompt (`kv_transfer.sealing`)."""
    CONTROL_CALL = b"control call"
    """Any two of a deployment's processes, to ask or tell something else (as the one before)."""


class _Role(Enum):
    INITIATOR = b"initiator"
    RESPONDER = b"responder"


class Secret:
    """What all processes of a deployment know and nobody else; shows itself to nobody."""

    __slots__ = ("_value",)

    def __init__(self, text: str) -> None:
        """Take a secret from its text, without white space around it; ValueError if too short."""
        value = text.strip().encode(errors="surrogateescape")  # as os.environ has bytes
        if len(value) < MIN_SECRET_BYTES:
            raise ValueError(
                f"a deployment secret needs at least {MIN_SECRET_BYTES} bytes, this one has "
                f"{len(value)}: draw one at random, e.g. `openssl rand -hex 32`"
            )
        self._value = value

    @staticmethod
    def fresh(random_bytes: RandomBytes = secrets.token_bytes) -> Secret:
        """A new one, of 256 random bits."""
        return Secret(random_bytes(32).hex())

    def reveal(self) -> str:
        """The text, to hand it to a process of the same deployment; never to be shown."""
        return self._value.decode(errors="surrogateescape")

    def key(self, *labels: bytes) -> bytes:
        """A key of 32 bytes for one use, from which neither the secret nor another key follows."""
        label = b"".join(hashlib.sha256(label).digest() for label in (_PREAMBLE, *labels))
        # Hashed first: HMAC fills short keys with zeros, so that two of them could be one.
        return hmac.digest(hashlib.sha256(self._value).digest(), label, "sha256")

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what is pickled is sent or stored where others can read it."""
        raise TypeError("a deployment secret is not to be pickled or copied")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both sides have said: what both proofs are about."""

    responder_nonce: bytes
    responder_name: bytes
    initiator_nonce: bytes
    initiator_name: bytes
    channel: bytes

    def proof(self, secret: Secret, purpose: Purpose, role: _Role) -> bytes:
        """That a process in this role knows the secret, and took part in this run."""
        said = b"".join(  # each of a fixed size, so that no others make the same bytes
            (
                self.responder_nonce,
                self.responder_name,
                self.initiator_nonce,
                self.initiator_name,
                hashlib.sha256(self.channel).digest(),
            )
        )
        return hmac.digest(secret.key(purpose.value, role.value), said, "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Responder:
    """The side that was connected to; one for each connection, since its nonce is fresh."""

    secret: Secret
    purpose: Purpose
    me: str
    """What this process is called, e.g. its incarnation: the initiator must be looking for it."""
    channel: bytes = b""
    """What carries the connection, where both ends can name it; empty where it is plain."""
    random_bytes: RandomBytes = field(default=secrets.token_bytes, repr=False)
    challenge: bytes = field(init=False)
    """CHALLENGE_BYTES that go out first."""

    def __post_init__(self) -> None:
        challenge = _PREAMBLE + self.random_bytes(_NONCE_BYTES) + _digest(self.me)
        object.__setattr__(self, "challenge", challenge)

    def admit(self, response: bytes) -> Admitted:
        """The initiator, if the RESPONSE_BYTES that came prove that it knows the secret.

        Raises `NotAuthenticatedError`.
        """
        initiator_nonce, initiator_name, mac = _parse(response, RESPONSE_BYTES)
        responder_nonce, responder_name, _ = _parse(self.challenge, CHALLENGE_BYTES)
        run = _Run(
            responder_nonce=responder_nonce,
            responder_name=responder_name,
            initiator_nonce=initiator_nonce,
            initiator_name=initiator_name,
            channel=self.channel,
        )
        if not hmac.compare_digest(mac, run.proof(self.secret, self.purpose, _Role.INITIATOR)):
            raise NotAuthenticatedError("who connected does not know the deployment's secret")
        proof = run.proof(self.secret, self.purpose, _Role.RESPONDER)
        return Admitted(proof=proof, name_digest=initiator_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """An initiator that has proved itself."""

    proof: bytes = field(repr=False)
    """PROOF_BYTES that go back to it."""
    name_digest: bytes
    """Of the name that it proved itself under."""

    def check_name(self, name: str) -> None:
        """Refuse an initiator that gives another name after its proof than in it."""
        if not hmac.compare_digest(self.name_digest, _digest(name)):
            raise NotAuthenticatedError(f"it proved itself under another name than {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Initiator:
    """The side that connects; one for each connection."""

    secret: Secret
    purpose: Purpose
    me: str
    """What this process is called."""
    peer: str
    """What the process is called that it wants to reach."""
    channel: bytes = b""
    """As for the responder."""
    random_bytes: RandomBytes = field(default=secrets.token_bytes, repr=False)

    def answer(self, challenge: bytes) -> Answer:
        """The response to the CHALLENGE_BYTES that came, and what the proof must be then.

        Raises `NotAuthenticatedError` where somebody else answers than who is wanted; nothing
        that depends on the secret has been sent then.
        """
        responder_nonce, responder_name, _ = _parse(challenge, CHALLENGE_BYTES)
        if not hmac.compare_digest(responder_name, _digest(self.peer)):
            raise NotAuthenticatedError(f"who answers is not {self.peer}")
        run = _Run(
            responder_nonce=responder_nonce,
            responder_name=responder_name,
            initiator_nonce=self.random_bytes(_NONCE_BYTES),
            initiator_name=_digest(self.me),
            channel=self.channel,
        )
        mac = run.proof(self.secret, self.purpose, _Role.INITIATOR)
        return Answer(
            response=_PREAMBLE + run.initiator_nonce + run.initiator_name + mac,
            expected=run.proof(self.secret, self.purpose, _Role.RESPONDER),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An initiator's answer, and what it waits for."""

    response: bytes
    """RESPONSE_BYTES that go to the responder."""
    expected: bytes = field(repr=False)

    def check(self, proof: bytes) -> None:
        """Refuse a responder whose proof is not the one that the secret makes."""
        if not hmac.compare_digest(proof, self.expected):
            raise NotAuthenticatedError("who answers does not know the deployment's secret")


def _digest(name: str) -> bytes:
    """A name in a fixed size; any, since a peer may give one that is no text."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).digest()


def _parse(message: bytes, size: int) -> tuple[bytes, bytes, bytes]:
    """Nonce, name and what comes behind them."""
    if len(message) != size or not message.startswith(_PREAMBLE):
        raise NotAuthenticatedError("the other end does not speak this version of Baton")
    nonce_end = len(_PREAMBLE) + _NONCE_BYTES
    name_end = nonce_end + _NAME_BYTES
    return message[len(_PREAMBLE) : nonce_end], message[nonce_end:name_end], message[name_end:]
