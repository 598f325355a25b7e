"""Runs spin on the model of the hand-off, and reads what it says. Standard library only."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("handoff.pml")

RELEASE = "eventual release"
"""The name of the liveness property; the others have the ids of tests/INVARIANTS.md."""

_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\+\d+)?) states, stored", re.MULTILINE)
_ERRORS = re.compile(r"errors: (\d+)")
_BROKEN = re.compile(r"assertion violated .*?broken==(\d+)")


class SpinError(Exception):
    """spin, the compiler or the search did not do its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may happen in a search."""

    attempts: int
    """Of request 0 to be computed by the prefill worker; request 1 has one."""
    crashes: int
    """Of both workers together."""

    def __str__(self) -> str:
        return f"attempts {self.attempts}, crashes {self.crashes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found."""

    states: int
    seconds: float
    violated: str | None
    """The property that failed first; None if all hold in every state."""


def has_spin() -> bool:
    """Whether spin and the compiler that it needs are installed."""
    return shutil.which("spin") is not None and shutil.which("gcc") is not None


def spin_version() -> str | None:
    """Its number, such as 6.5.2; None where it is not installed."""
    if not has_spin():
        return None
    said = subprocess.run(["spin", "-V"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+\.\d+", said)
    return found[0] if found is not None else None


def names_of(kind: str) -> list[str]:
    """The model's names of one kind (transfer, lease, status, block, event, invariant)."""
    found = re.search(rf"^mtype:{kind} = \{{([^}}]*)\}};", MODEL.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SpinError(f"the model has no names of kind {kind}")
    return [name.strip() for name in found[1].split(",")]


def search(bounds: Bounds, *, release: bool = False, mutant: str | None = None) -> Outcome:
    """Search every state within the bounds, for the invariants or for eventual release."""
    defines = [f"-DATTEMPTS={bounds.attempts}", f"-DCRASHES={bounds.crashes}"]
    defines += ["-DRELEASE"] if release else []
    defines += [f"-DMUTANT_{mutant}"] if mutant else []
    # NOREDUCE: every action touches what others see, so that a reduction finds nothing to reduce.
    # NOBOUNDCHECK: the search for the invariants, of the same states, looks at every index.
    options = ["-DNFAIR=2", "-DNOBOUNDCHECK", "-DNOFIX"] if release else ["-DSAFETY"]
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        _run(["spin", "-a", *defines, str(MODEL)], folder)
        _run(
            ["gcc", "-O2", "-w", "-DNOREDUCE", "-DMEMLIM=2800", *options, "-o", "pan", "pan.c"],
            folder,
        )
        started_at = time.monotonic()
        said = _run(["./pan", "-m20000", "-w22", *(["-a", "-f"] if release else [])], folder)
        return _read(said, time.monotonic() - started_at)


def walk(seed: int, *, steps: int = 1500) -> str:
    """What a random walk through the model prints: its events, and the state after each."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        command = ["spin", "-T", f"-n{seed}", f"-u{steps}", "-DTRACE", str(MODEL)]
        return _run(command, folder)


def _read(said: str, seconds: float) -> Outcome:
    count, errors = _COUNT.search(said), _ERRORS.search(said)
    # Once a cycle is there to be found, looking for a fair one may run around it to any depth.
    is_cut_short = "max search depth too small" in said and errors is not None and errors[1] == "0"
    if count is None or errors is None or is_cut_short:
        raise SpinError(f"the search did not end as it should:\n{said}")
    violated = None
    if errors[1] != "0":
        broken = _BROKEN.search(said)
        # spin numbers the names of a kind from the last one on.
        violated = names_of("invariant")[-int(broken[1])] if broken is not None else RELEASE
        violated = violated.replace("INV_", "INV-")
    return Outcome(states=int(float(count[1])), seconds=seconds, violated=violated)


def _run(command: Sequence[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SpinError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout
