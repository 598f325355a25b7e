"""What a process that runs an engine beside an event loop needs to be told once."""

from __future__ import annotations

import sys

_SWITCH_INTERVAL_S = 0.0005
"""The step thread and the event loop share the interpreter lock: with Python's 5 ms, a token would
wait that long for the loop whenever the step is between two operators."""


def prepare_engine_process() -> None:
    """Let the event loop get the interpreter quickly while a step runs."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
