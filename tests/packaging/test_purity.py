"""Modules that decide load no tensor library and no Ray: checked in a fresh interpreter.

import-linter reads the import statements; this runs them, and so sees what a package's
`__init__` or a third party brings along.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packaging.checkout import REPOSITORY

CONTRACT = "deciding is pure: no tensors in P modules"
FORBIDDEN = frozenset({"torch", "transformers", "ray"})

_PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(set(sys.argv[2:]) & set(sys.modules))))
"""


def pure_modules() -> list[str]:
    """Every module of the contract, the modules of its packages included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (contract,) = (entry for entry in contracts if entry["name"] == CONTRACT)
    assert set(contract["forbidden_modules"]) >= FORBIDDEN
    return [module for name in contract["source_modules"] for module in _with_submodules(name)]


def loaded_by(module: str, *, cwd: Path = REPOSITORY) -> list[str]:
    """The forbidden packages that are loaded once the module is."""
    command = [sys.executable, "-c", _PROGRAM, module, *FORBIDDEN]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def _with_submodules(name: str) -> list[str]:
    folder = REPOSITORY / Path(*name.split("."))
    if not folder.is_dir():
        return [name]
    files = sorted(folder.rglob("*.py"))
    parts = [file.relative_to(REPOSITORY).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


@pytest.mark.parametrize("module", pure_modules())
def test_module_loads_neither_tensors_nor_ray(module):
    assert loaded_by(module) == []


def test_an_import_by_way_of_another_module_is_seen(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    (tmp_path / "between.py").write_text("import ray\n")
    (tmp_path / "looks_pure.py").write_text("import between\n")

    assert loaded_by("looks_pure", cwd=tmp_path) == ["ray"]
