"""Where the deployment's secret comes from; `kv_transfer.authentication` says what it is for.

It is in the environment alone: settings are written to files and shown by Serve, and a runtime
environment is part of the state that Ray shows to whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kv_transfer.authentication import Secret

__all__ = ["SECRET_FILE_VARIABLE", "SECRET_VARIABLE", "SecretError", "read_secret"]

SECRET_VARIABLE = "BATON_SECRET"  # the name of a variable
SECRET_FILE_VARIABLE = "BATON_SECRET_FILE"


class SecretError(Exception):
    """The environment names a secret that cannot be used."""


def read_secret(environ: Mapping[str, str]) -> Secret | None:
    """What BATON_SECRET says, else what the file of BATON_SECRET_FILE holds, else None.

    Raises `SecretError`, which says what is wrong and never what was read.
    """
    text = environ.get(SECRET_VARIABLE)
    origin = SECRET_VARIABLE
    if not text:
        path = environ.get(SECRET_FILE_VARIABLE)
        if not path:
            return None
        origin = f"{SECRET_FILE_VARIABLE}={path}"
        try:
            text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            raise SecretError(f"{origin} cannot be read: {error.strerror}") from error
    try:
        return Secret(text)
    except ValueError as error:
        raise SecretError(f"{origin}: {error}") from None
