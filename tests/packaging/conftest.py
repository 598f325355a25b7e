"""One wheel for all packaging tests, built from this checkout without a network."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.checkout import REPOSITORY, run


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def packages(project: dict[str, Any]) -> list[str]:
    """The five top-level packages, as the wheel is told to hold them."""
    names: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return names


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout; its build backend is the installed one, so nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    build: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        ".",
    ]
    run(build, cwd=REPOSITORY)
    (path,) = folder.glob("*.whl")
    return path
