"""The wheel holds the five packages with their presets, nothing else, and works by itself."""

from __future__ import annotations

import json
import os
import site
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.checkout import REPOSITORY, run


@pytest.fixture(scope="session")
def names(wheel: Path) -> list[str]:
    """Every file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it and our dependencies in reach.

    The dependencies stay where they are: a `.pth` file adds their folder to the search path, and
    the `.pth` files in there are not read, so an editable install of ours is out of sight.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", wheel], cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, object]:
    """Run in an empty folder, without this checkout on the search path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {"cwd": tmp_path, "env": environment}


def test_check_wheel_contents_finds_nothing(wheel):
    command = [sys.executable, "-m", "check_wheel_contents", "--config", "pyproject.toml", wheel]

    assert run(command, cwd=REPOSITORY).strip().endswith("OK")


def test_wheel_has_the_five_packages_and_its_metadata_only(names, packages, project):
    version = project["project"]["version"]

    tops = {name.split("/")[0] for name in names}

    assert tops == {*packages, f"baton_serve-{version}.dist-info"}


def test_wheel_has_every_module_of_the_checkout(names, packages):
    modules = {
        str(path.relative_to(REPOSITORY))
        for package in packages
        for path in (REPOSITORY / package).rglob("*.py")
    }

    assert modules == {name for name in names if name.endswith(".py")}


def test_wheel_has_every_preset(names):
    presets = sorted((REPOSITORY / "configs" / "presets").glob("*.yaml"))

    assert presets
    assert {str(path.relative_to(REPOSITORY)) for path in presets} <= set(names)


def test_wheel_has_no_tests_and_no_leftovers(names):
    unwanted = ("test", "__pycache__", ".pyc", "conftest", ".env")

    assert not [name for name in names if any(word in name.lower() for word in unwanted)]


def test_wheel_carries_the_licence(names):
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_baton_runs_from_the_wheel(installed, elsewhere, project):
    output = run([installed / "bin" / "baton", "version"], **elsewhere)

    assert project["project"]["version"] in output


def test_all_packages_come_from_the_wheel(installed, elsewhere, packages):
    program = (
        "import importlib, json\n"
        f"print(json.dumps([importlib.import_module(name).__file__ for name in {packages!r}]))"
    )

    files = json.loads(run([installed / "bin" / "python", "-c", program], **elsewhere))

    assert all(Path(file).is_relative_to(installed) for file in files), files


def test_presets_are_read_from_the_wheel(installed, elsewhere):
    program = "from configs.load import presets\nprint(*(preset.name for preset in presets()))"

    output = run([installed / "bin" / "python", "-c", program], **elsewhere)

    assert set(output.split()) == {
        path.stem for path in (REPOSITORY / "configs" / "presets").glob("*.yaml")
    }


def test_check_wheel_contents_reports_a_sixth_package(wheel, tmp_path):
    """The planted mistake: without it a check that reads no configuration would look the same."""
    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as good, zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("/RECORD"):
                content += b"tests/__init__.py,,\n"
            archive.writestr(name, content)
        archive.writestr("tests/__init__.py", "")
    command = [sys.executable, "-m", "check_wheel_contents", "--config", "pyproject.toml", bad]

    with pytest.raises(AssertionError, match="W202"):
        run(command, cwd=REPOSITORY)
