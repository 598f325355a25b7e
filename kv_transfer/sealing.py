"""One call and its answers, each sealed by somebody who knows the deployment's secret.

For a call that rides on a connection which is not ours and says nothing of who is at its other end:

    caller   -> answerer   CALL      preamble, nonce, MAC(key of callers: nonce, body), body
    answerer -> caller     ANSWER    preamble, MAC(key of answerers: MAC before, body), body

The nonce is fresh and 256 bits long, so that no two calls have one MAC. An answer's MAC covers that
of the answer before it, and the first one's that of the call: an answer to another call, one that
comes twice, too early or after one that was left out does not open, and of two answerers to one
call only the one whose first answer came first is heard (who calls many hears each by a copy of the
call). Callers and answerers have keys of their own, as do the purposes, so that nothing that one of
them sealed is worth anything in the other direction. All is checked over the bytes as they came;
nobody looks into a body before.

What it does not do: nothing is hidden; the last answer is not marked as such, that is for what the
bodies say; and who has recorded a call can make it once more. So a call names what it is about, and
its answers may tell only what is of no use without the secret.

Values and functions without I/O:

    call = SealedCall(secret, purpose, body)            # the caller
    opened = OpenedCall(secret, purpose, call.message)  # the answerer
    call.open(opened.seal(answer))                      # for each answer, in order

Each raises `NotAuthenticatedError` where a check fails.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from kv_transfer.authentication import Purpose, RandomBytes, Secret
from kv_transfer.transport import NotAuthenticatedError

__all__ = ["REFUSAL", "OpenedCall", "SealedCall"]

_PREAMBLE: Final = b"BatonSe\x01"
"""Says that this is sealed, and in which version."""
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_CALLER: Final = b"caller"
_ANSWERER: Final = b"answerer"

REFUSAL: Final = _PREAMBLE + b"refused: this call is not sealed with the deployment's secret"
"""What a stranger is answered; it proves nothing, and opens as no answer."""


class SealedCall:
    """A call and what has come back of it; the caller's side of it."""

    def __init__(
        self,
        secret: Secret,
        purpose: Purpose,
        body: bytes,
        *,
        random_bytes: RandomBytes = secrets.token_bytes,
    ) -> None:
        nonce = random_bytes(_NONCE_BYTES)
        self._answerer_key = secret.key(purpose.value, _ANSWERER)
        self._last_mac = hmac.digest(secret.key(purpose.value, _CALLER), nonce + body, "sha256")
        self.message: Final = _PREAMBLE + nonce + self._last_mac + body
        """What goes to the answerer."""

    def open(self, answer: object) -> bytes:
        """The body of the next answer, whatever it is that came as such."""
        if answer == REFUSAL:
            raise NotAuthenticatedError("who answers says that this call is not sealed as it must")
        sealed = _checked(answer, len(_PREAMBLE) + _MAC_BYTES)
        mac, body = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        expected = hmac.digest(self._answerer_key, self._last_mac + body, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise NotAuthenticatedError(
                "who answers does not know the deployment's secret, or this is not the next answer "
                "to this call"
            )
        self._last_mac = mac
        return body


class OpenedCall:
    """A call of somebody who knows the secret; the answerer's side of it."""

    def __init__(self, secret: Secret, purpose: Purpose, message: object) -> None:
        """Open what came as a call, whatever it is."""
        sealed = _checked(message, len(_PREAMBLE) + _NONCE_BYTES + _MAC_BYTES)
        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        mac, body = rest[:_MAC_BYTES], rest[_MAC_BYTES:]
        expected = hmac.digest(secret.key(purpose.value, _CALLER), nonce + body, "sha256")
        if not hmac.compare_digest(mac, expected):
            raise NotAuthenticatedError("who calls does not know the deployment's secret")
        self._answerer_key = secret.key(purpose.value, _ANSWERER)
        self._last_mac = mac
        self.message: Final = _PREAMBLE + sealed
        """What came: no other call has these bytes."""
        self.body: Final = body
        """What the caller says."""

    def seal(self, body: bytes) -> bytes:
        """The next answer; the caller must get all of them, in this order."""
        self._last_mac = hmac.digest(self._answerer_key, self._last_mac + body, "sha256")
        return _PREAMBLE + self._last_mac + body


def _checked(message: object, min_bytes: int) -> bytes:
    """What is behind the preamble of something that may be sealed."""
    if (
        not isinstance(message, bytes)
        or len(message) < min_bytes
        or not message.startswith(_PREAMBLE)
    ):
        raise NotAuthenticatedError("what came is not sealed, or not by this version of Baton")
    return message[len(_PREAMBLE) :]
