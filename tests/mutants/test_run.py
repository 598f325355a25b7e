"""The table of planted mistakes cannot be right by accident."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.run import PATCHES, REPOSITORY, Mutant, MutantError, checkout, failing
from tests.mutants.table import BEGIN, DOCUMENT, table, with_table
from tests.verify.check import MUTANTS

TEST = "tests/unit/kv_transfer/test_geometry.py"
HARMLESS = f"""Says nothing new.
Test: {TEST}

--- a/kv_transfer/__init__.py
+++ b/kv_transfer/__init__.py
@@ -1 +1,2 @@
+# Nothing.
{{first_line}}
"""


def patch(folder: Path, first_line: str) -> Path:
    path = folder / "harmless.patch"
    path.write_text(HARMLESS.format(first_line=f" {first_line}"), "utf-8")
    return path


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_patch_names_its_tests_and_fits_the_code(path: Path):
    assert Mutant.read(path).tests

    subprocess.run(["git", "apply", "--check", str(path)], cwd=REPOSITORY, check=True)


def test_documented_mistakes_are_those_that_are_planted():
    text = DOCUMENT.read_text("utf-8")

    assert with_table(text) == text, "run: python -m tests.mutants.table"
    assert len(table().splitlines()) == 2 + len(list(PATCHES.glob("*.patch"))) + len(MUTANTS)


def test_mistake_that_is_planted_by_nobody_is_reported():
    text = DOCUMENT.read_text("utf-8")
    claimed = text.replace(f"{BEGIN}\n", f"{BEGIN}\n| code | every other | `no test` |\n")

    assert claimed != text
    assert with_table(claimed) == text


def test_mistake_that_no_test_sees_survives(tmp_path: Path):
    first_line = (REPOSITORY / "kv_transfer/__init__.py").read_text("utf-8").splitlines()[0]

    assert Mutant.read(patch(tmp_path, first_line)).killed_by() == []


def test_patch_that_does_not_fit_is_no_survivor(tmp_path: Path):
    with pytest.raises(MutantError, match="does not apply"):
        Mutant.read(patch(tmp_path, "a line that is not there")).killed_by()


def test_patch_without_a_test_is_refused(tmp_path: Path):
    path = tmp_path / "nameless.patch"
    path.write_text("Says nothing.\n", "utf-8")

    with pytest.raises(MutantError, match="names no test"):
        Mutant.read(path)


def test_tests_that_do_not_exist_are_no_failures():
    with checkout() as copy, pytest.raises(MutantError, match="did not run"):
        failing(copy, [f"{TEST}::test_that_was_never_written"])
