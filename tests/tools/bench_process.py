"""What every bench does at its start: be told to stop, and say on which machine it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from kv_transfer.transport_kinds import CAPABILITIES
from kv_transfer.transports.nixl_agent import has_nixl
from tests.tools.baton_server import MODEL
from tests.tools.tiny_model import make_tiny_model

__all__ = ["bench_directory", "model_for", "runnable", "say"]


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


@contextmanager
def bench_directory() -> Iterator[Path]:
    """A directory of its own; SIGTERM ends the block as Ctrl-C does, so that servers stop."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    say(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    try:
        with TemporaryDirectory(prefix="baton-bench-") as directory:
            yield Path(directory)
    finally:
        signal.signal(signal.SIGTERM, before)


def model_for(kind: str, directory: Path) -> str:
    """`model.source` of the tiny model, which is written into the directory, or the default one."""
    return str(make_tiny_model(directory)) if kind == "tiny" else MODEL


def runnable(transports: Sequence[str]) -> list[str]:
    """Those that are one transport each, move blocks of host memory, and are installed."""
    left_out = {"auto"} if has_nixl() else {"auto", "nixl"}
    named = [transport for transport in transports if transport not in left_out]
    return [transport for transport in named if transport in CAPABILITIES]
