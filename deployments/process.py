"""What the processes of the deployments need to be told once, at their start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from configs.schema import Settings

_OUR_PACKAGES = ("deployments", "workers", "kv_transfer", "router")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_OWN_ADDRESS = "BATON_TRANSFER__HOST"
_SWITCH_INTERVAL_S = 0.0005
"""The step thread and the event loop share the interpreter lock: with Python's 5 ms, a token would
wait that long for the loop whenever the step is between two operators."""


def log_to_stderr() -> None:
    """Write our packages' log lines to the process's log, where Ray keeps them; safe to repeat."""
    # Serve puts an object of its own at sys.stderr, which keeps lines back by the thousand.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    for name in _OUR_PACKAGES:
        package_logger = logging.getLogger(name)
        package_logger.handlers = [handler]
        package_logger.setLevel(logging.INFO)
        package_logger.propagate = False


def prepare_engine_process() -> None:
    """Log, and let the event loop get the interpreter quickly while a step runs."""
    log_to_stderr()
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
