"""`make mutants`: each patch beside this file plants one mistake in the code; tests must see it.

A patch says in its first lines what the mistake is and which tests are to fail. It is applied to a
copy of the checkout, so that nothing here changes. Exits with 1 if a mistake survives its tests,
if a patch does not fit the code any more, or if the tests fail without it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent
TIMEOUT_S = 300.0

_TEST = re.compile(r"^Test: (\S+)$", re.MULTILINE)
_FAILED = re.compile(r"^FAILED (\S+)", re.MULTILINE)


class MutantError(Exception):
    """A mistake was not planted or not looked for: the table would say nothing about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One patch, and the tests that must fail with it."""

    patch: Path
    tests: tuple[str, ...]

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        """Raises `MutantError` if the patch names no test."""
        tests = tuple(_TEST.findall(patch.read_text("utf-8")))
        if not tests:
            raise MutantError(f"{patch.name} names no test")
        return cls(patch=patch, tests=tests)

    @property
    def name(self) -> str:
        """The file's name, as words."""
        return self.patch.stem.replace("_", " ")

    @property
    def story(self) -> str:
        """What the patch says that the mistake is: its text before the tests, in one line."""
        said, _, _ = self.patch.read_text("utf-8").partition("Test: ")
        return " ".join(said.split())

    def killed_by(self) -> list[str]:
        """The tests that fail in a copy with the mistake; none if it survives."""
        with checkout() as copy:
            applied = subprocess.run(
                ["git", "apply", str(self.patch)], cwd=copy, capture_output=True, text=True
            )
            if applied.returncode != 0:
                raise MutantError(f"{self.patch.name} does not apply:\n{applied.stderr}")
            return failing(copy, self.tests)


@contextmanager
def checkout() -> Iterator[Path]:
    """A copy of what is in the repository, changes that are not committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            source, target = REPOSITORY / name, Path(folder, name)
            if source.is_file() and not source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        yield Path(folder)


def failing(copy: Path, tests: Sequence[str]) -> list[str]:
    """Those of the tests that fail in a copy; raises `MutantError` if they do not run."""
    # Native tracebacks: CPython 3.11's parser, which pytest's own need, failed on a deep stack.
    options = ("-q", "-rf", "-p", "no:cacheprovider", "--tb=native")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # The editable install names the checkout; no byte code, for a patch may keep a file's time.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    failed = _FAILED.findall(done.stdout)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(failed):
        raise MutantError(f"the tests did not run:\n{done.stdout}\n{done.stderr}")
    return failed


def check(mutants: Sequence[Mutant]) -> bool:
    """Print a line for each mutant; whether every one of them was seen."""
    with checkout() as copy:
        if broken := failing(copy, sorted({test for mutant in mutants for test in mutant.tests})):
            raise MutantError(f"tests fail without any mistake: {broken}")
    print("| planted mistake | failing test |")
    print("| --- | --- |")
    are_all_seen = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, killers in zip(mutants, pool.map(Mutant.killed_by, mutants), strict=True):
            seen_by = f"`{killers[0].partition('[')[0]}`" if killers else "SURVIVES"
            print(f"| {mutant.name} | {seen_by} |", flush=True)
            are_all_seen &= bool(killers)
    return are_all_seen


def main() -> int:
    """All patches, in the order of their names."""
    mutants = [Mutant.read(patch) for patch in sorted(PATCHES.glob("*.patch"))]
    return 0 if check(mutants) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutantError as error:
        sys.exit(f"mutants: {error}")
