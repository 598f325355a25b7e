"""What a process that runs an engine beside an event loop needs to be told once."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from configs.schema import Settings

_OWN_ADDRESS = "BATON_TRANSFER__HOST"
_SWITCH_INTERVAL_S = 0.0005
"""The step thread and the event loop share the interpreter lock: with Python's 5 ms, a token would
wait that long for the loop whenever the step is between two operators."""


def prepare_engine_process() -> None:
    """Let the event loop get the interpreter quickly while a step runs."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def at_own_address(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """The settings, with the address of this pod where its environment names it.

    In a cluster every pod listens for fetches on its own address, which no shared settings can
    hold; the manifests pass it as BATON_TRANSFER__HOST. On one host the settings say it.
    """
    host = environ.get(_OWN_ADDRESS)
    if not host:
        return settings
    transfer = settings.transfer.model_copy(update={"host": host})
    return settings.model_copy(update={"transfer": transfer})
