"""Which version of Baton this is."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

__all__ = ["installed_version"]


def installed_version() -> str:
    """The installed distribution's version; in a bare checkout, that of its pyproject.toml."""
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parent.parent / "pyproject.toml"
        version: str = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
        return version
