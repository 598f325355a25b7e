"""What the processes of the deployments need to be told once, at their start."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

from configs.schema import Settings
from deployments.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, SecretError, read_secret
from kv_transfer.authentication import Secret
from workers.planning import share_cores, total_threads

_OUR_PACKAGES = ("deployments", "workers", "kv_transfer", "router")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_OWN_ADDRESSES: Mapping[str, str] = MappingProxyType(
    {"transfer": "BATON_TRANSFER__HOST", "channel": "BATON_CHANNEL__HOST"}
)
"""Groups of settings whose host differs from pod to pod, and where a pod's environment has it."""
_WAITING = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
"""What says how OpenMP's threads wait; a user who sets either has decided."""
_SPIN_BRIEFLY: Mapping[str, str] = MappingProxyType({"GOMP_SPINCOUNT": "20000"})
"""A forward pass has hundreds of parallel parts a few microseconds apart: a thread that sleeps
between them wakes too late (a step of one token took 1.8 times as long). This is about a
millisecond, enough for the way from one part to the next also in bf16, and little where the core is
wanted."""
_SLEEP_AT_ONCE: Mapping[str, str] = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""Threads that spin on cores that others need slow all of them down many times."""
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


def prepare_engine_process(
    settings: Settings, *, cores: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Log, say how compute threads wait for each other, and let the event loop run beside a step.

    Call it before the first import of torch, whose OpenMP reads its settings once. `cores` are
    those of the host, or the container.
    """
    if not _WAITING & environ.keys():
        environ.update(_SPIN_BRIEFLY if _can_spin(settings, cores) else _SLEEP_AT_ONCE)
    log_to_stderr()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def spare_what_stays() -> None:
    """Let the garbage collector pass by all that there is now; to be called when all is loaded.

    The modules and the model stay as long as the process, and looking through their half a million
    objects stops it for a quarter of a second, each time that a quarter as many have come.
    """
    gc.collect()
    gc.freeze()


def _can_spin(settings: Settings, cores: int) -> bool:
    """Whether threads that wait for each other keep nobody else's from a core.

    Workers that share the cores have threads beside their first one only where these are free.
    """
    return share_cores(settings) or total_threads(settings, cores=cores) <= cores


def at_own_address(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """The settings, with the addresses of this pod where its environment names them.

    In a cluster every pod listens for fetches and for Fronts on its own address, which no shared
    settings can hold; the manifests pass it. On one host the settings say it. Raises pydantic's
    ValidationError for an address that peers cannot dial.
    """
    own = {}
    for name, variable in _OWN_ADDRESSES.items():
        if host := environ.get(variable):
            group = getattr(settings, name)
            own[name] = type(group).model_validate(group.model_dump() | {"host": host})
    return settings.model_copy(update=own)


def deployment_secret(environ: Mapping[str, str]) -> Secret:
    """What this process and those that it talks to know each other by.

    Raises `SecretError` where there is none, or none that can be used.
    """
    secret = read_secret(environ)
    if secret is None:
        raise SecretError(
            f"Fronts and workers know each other by the deployment's secret: set {SECRET_VARIABLE} "
            f"or {SECRET_FILE_VARIABLE}, to the same for all of them (`openssl rand -hex 32` makes "
            "one)"
        )
    return secret
