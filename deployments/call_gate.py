"""Lets calls of this deployment in to a process, and counts the others.

They ride on Serve handles, which say nothing of who is at their other end, so each is sealed with
the deployment's secret (`kv_transfer.sealing`). What is behind the gate sees no call that is not.
"""

from __future__ import annotations

import logging
from typing import Final

from kv_transfer.authentication import Purpose, Secret
from kv_transfer.sealing import OpenedCall
from kv_transfer.transport import NotAuthenticatedError

__all__ = ["OTHER_VERSION", "CallGate"]

logger = logging.getLogger(__name__)

OTHER_VERSION: Final = "it does not speak this version of Baton"
"""Of who knows the secret and says with it what is not understood."""


class CallGate:
    """One for each process, for every kind of call that it takes."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._num_strangers = 0

    @property
    def num_strangers(self) -> int:
        """Calls so far of those who had not proved to know the secret."""
        return self._num_strangers

    def open(self, purpose: Purpose, message: object) -> OpenedCall | None:
        """What came as a call, whatever it is; None for a stranger's, to be answered `REFUSAL`."""
        try:
            return OpenedCall(self._secret, purpose, message)
        except NotAuthenticatedError as error:
            self.count_stranger(purpose, str(error))
            return None

    def count_stranger(self, purpose: Purpose, reason: str) -> None:
        """A call is refused as a stranger's; `reason` has no word of what it says."""
        self._num_strangers += 1
        logger.warning("%s refused reason=%s", purpose.value.decode(), reason)
