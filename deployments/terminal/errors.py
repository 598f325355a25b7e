"""What can go wrong between the command line and a server; messages are shown as they are.

ApiError
+-- UnreachableError     nothing answers at the address
+-- RefusedError         the server answered with an error status
+-- BrokenAnswerError    the answer broke off, holds an error, or is not what the API promises
"""

from __future__ import annotations

__all__ = ["ApiError", "BrokenAnswerError", "RefusedError", "UnreachableError"]


class ApiError(Exception):
    """A request to a server did not work out."""


class UnreachableError(ApiError):
    """Nothing answers at the address."""


class RefusedError(ApiError):
    """The server answered with an error status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class BrokenAnswerError(ApiError):
    """The answer broke off, holds an error, or is not what the API promises."""
