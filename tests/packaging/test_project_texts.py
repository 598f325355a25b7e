"""The project's texts name things that exist: invariants, failures, tests, versions, files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.packaging.checkout import REPOSITORY

TABLE = REPOSITORY / "tests" / "INVARIANTS.md"
FAILURES = [f"F{number}" for number in range(1, 53)]
INVARIANT = re.compile(r"\bINV-[A-Z]+(?:-[A-Z]+)*\b")
REFERENCE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.py)(?:::(\w+))?`")


def rows(text: str, pattern: str = "INV-") -> dict[str, str]:
    """The rows by what they are about: the invariants, or what else begins like the pattern."""
    lines = (line for line in text.splitlines() if re.match(rf"\| {pattern}", line))
    return {line.split("|")[1].strip(): line for line in lines}


def broken_references(table: str) -> Iterator[str]:
    """Each `file.py` or `file.py::test` in the table that is not in the checkout."""
    for match in REFERENCE.finditer(table):
        path, name = REPOSITORY / match[1], match[2] or ""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if not path.exists() or (name and not re.search(rf"\b(def|class) {name}\b", text)):
            yield match[0]


def named_tests(row: str) -> list[str]:
    """The tests that a row names, as pytest calls them."""
    return [f"{match[1]}::{match[2]}" for match in REFERENCE.finditer(row) if match[2]]


def uncollected(tests: Sequence[str]) -> list[str]:
    """Those that pytest does not find; what it says, if it says anything else than that."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *tests], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    missing = re.findall(r"ERROR: not found: (\S+)", done.stderr)
    return missing or [done.stdout + done.stderr]


def mentioned(packages: list[str]) -> dict[str, Path]:
    """The invariants that the code names, and a file that does."""
    return {
        invariant: path
        for package in packages
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for invariant in INVARIANT.findall(path.read_text(encoding="utf-8"))
    }


def test_every_invariant_in_the_code_has_a_row(packages):
    assert mentioned(packages).keys() <= rows(TABLE.read_text(encoding="utf-8")).keys()


def test_every_file_and_test_in_the_table_exists():
    assert list(broken_references(TABLE.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "reference",
    ["`tests/unit/test_gone.py`", "`tests/packaging/test_project_texts.py::test_never_written`"],
)
def test_a_reference_to_what_is_gone_is_reported(reference):
    assert list(broken_references(f"| INV-X | is so | {reference} |")) == [reference]


def test_every_failure_of_the_catalogue_has_tests_or_cannot_occur():
    table = rows(TABLE.read_text(encoding="utf-8"), r"F\d+ ")

    assert list(table) == FAILURES
    assert [
        name for name, row in table.items() if not named_tests(row) and "Cannot occur" not in row
    ] == []


@pytest.mark.timeout(300)
def test_pytest_collects_every_test_of_the_catalogue():
    table = rows(TABLE.read_text(encoding="utf-8"), r"F\d+ ")

    assert uncollected(sorted({test for row in table.values() for test in named_tests(row)})) == []


@pytest.mark.timeout(300)
def test_a_test_that_pytest_does_not_collect_is_reported():
    here = "tests/packaging/test_project_texts.py"

    missing = uncollected([f"{here}::test_gone", f"{here}::test_version_is_in_the_changelog"])

    assert [path.rpartition("/")[2] for path in missing] == ["test_project_texts.py::test_gone"]


def test_version_is_in_the_changelog(project):
    version = project["project"]["version"]
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE) or (
        "## [Unreleased]" in text and f"To be {version}" in text
    )


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", "k8s/README.md"])
def test_folders_and_files_named_in_a_text_exist(name):
    path = REPOSITORY / name
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", path.read_text(encoding="utf-8"))

    missing = [
        word
        for word in named
        if not any((base / word).exists() for base in (REPOSITORY, path.parent))
    ]

    # Beside the checkout, and absent from most machines.
    assert set(missing) <= {"../shared/data"}
