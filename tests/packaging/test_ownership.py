"""Nobody else's distribution has a package of one of our names: pip would overwrite either."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

OURS = "baton-serve"


def foreign_owners(packages: Iterable[str]) -> dict[str, list[str]]:
    """Distributions other than ours that bring a package of these names, by package.

    An editable install brings none by itself: its files stay in the checkout.
    """
    owners = metadata.packages_distributions()
    found = {package: sorted(set(owners.get(package, [])) - {OURS}) for package in packages}
    return {package: names for package, names in found.items() if names}


def test_our_packages_are_ours_alone(packages):
    assert foreign_owners(packages) == {}


def test_another_distribution_with_our_name_is_reported(
    packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    intruder = tmp_path / "intruder-1.0.dist-info"
    intruder.mkdir()
    (intruder / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (intruder / "RECORD").write_text("router/__init__.py,,\nintruder-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert foreign_owners(packages) == {"router": ["intruder"]}
