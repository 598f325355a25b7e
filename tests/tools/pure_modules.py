"""The modules that decide and so are pure, as the import contract lists them.

    python -m tests.tools.pure_modules

prints their files with commas between, for coverage's `--include`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["FORBIDDEN", "pure_modules"]

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACT = "deciding is pure: no tensors in P modules"
FORBIDDEN = frozenset({"torch", "transformers", "ray"})


def pure_modules() -> list[str]:
    """Every module of the contract, the modules of its packages included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (entry for entry in contracts if entry["name"] == CONTRACT)
    assert set(contract["forbidden_modules"]) >= FORBIDDEN
    return [module for name in contract["source_modules"] for module in _with_submodules(name)]


def _with_submodules(name: str) -> list[str]:
    folder = REPOSITORY / Path(*name.split("."))
    if not folder.is_dir():
        return [name]
    files = sorted(folder.rglob("*.py"))
    parts = [file.relative_to(REPOSITORY).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


def _file(module: str) -> str:
    path = Path(*module.split("."))
    is_package = (REPOSITORY / path).is_dir()
    return str(path / "__init__.py" if is_package else path.with_suffix(".py"))


if __name__ == "__main__":
    print(",".join(map(_file, pure_modules())))
