"""Modules that decide load no tensor library and no Ray: checked in a fresh interpreter.

import-linter reads the import statements; this runs them, and so sees what a package's
`__init__` or a third party brings along.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import REPOSITORY
from tests.tools.pure_modules import FORBIDDEN, pure_modules

_PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(set(sys.argv[2:]) & set(sys.modules))))
"""


def loaded_by(module: str, *, cwd: Path = REPOSITORY) -> list[str]:
    """The forbidden packages that are loaded once the module is."""
    command = [sys.executable, "-c", _PROGRAM, module, *FORBIDDEN]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", pure_modules())
def test_module_loads_neither_tensors_nor_ray(module):
    assert loaded_by(module) == []


def test_an_import_by_way_of_another_module_is_seen(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("")
    (tmp_path / "between.py").write_text("import ray\n")
    (tmp_path / "looks_pure.py").write_text("import between\n")

    assert loaded_by("looks_pure", cwd=tmp_path) == ["ray"]
