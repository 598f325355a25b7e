"""What GPUs a host has for a model that is to run on them, and the check of it.

Pure: `workers.host` looks, this judges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.checks import Check, Outcome

__all__ = ["GpuOutlook", "check_device"]

_NEEDED = "model.device is cuda, but"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutlook:
    """The GPUs that torch sees."""

    num_gpus: int | None
    """None where this process sees one worker's alone, so that they say nothing about the host."""
    obstacle: str = ""
    """Why torch can use none; empty where it can."""


def check_device(outlook: GpuOutlook, shares: Iterable[float]) -> Check:
    """A model that is to run on GPUs finds them; `shares` is what each worker books of one."""
    booked = sum(shares)
    if outlook.obstacle:
        sentence = f"{_NEEDED} {outlook.obstacle}: set it to cpu, or start where a GPU is."
        return Check(id="DEVICE", outcome=Outcome.FAILS, sentence=sentence)
    if outlook.num_gpus is not None and booked > outlook.num_gpus:
        sentence = (
            f"{_NEEDED} the workers book {booked:g} GPUs and there are {outlook.num_gpus}: lower "
            "decode.engine.gpu_share and prefill.engine.gpu_share, or run fewer workers."
        )
        return Check(id="DEVICE", outcome=Outcome.FAILS, sentence=sentence)
    found = "" if outlook.num_gpus is None else f" of the {outlook.num_gpus} that are here"
    sentence = f"The workers book {booked:g} GPUs{found}; Baton was not run on a GPU so far."
    return Check(id="DEVICE", outcome=Outcome.WARNS, sentence=sentence)
