"""This checkout and the commands that the packaging tests run in it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def run(command: Sequence[str | Path], *, cwd: Path, **options: Any) -> str:
    """Standard output of a command that must succeed; what it said otherwise is in the failure."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    output: str = done.stdout
    return output
