from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from deployments.terminal.models import PullDisplay, models_as_text, pull
from deployments.terminal.tables import format_columns
from workers.models.catalog import MODELS
from workers.models.errors import ModelNotFoundError
from workers.models.store import ModelStore, PullProgress, StoredModel

NAME = next(iter(MODELS))


def stored(name: str, *, is_current: bool) -> StoredModel:
    return StoredModel(
        name=name,
        path=Path("/nowhere"),
        licence="MIT",
        origin="an/origin",
        packages=(),
        conversion_version=1,
        pulled_at=datetime(2026, 1, 1, tzinfo=UTC),
        size_bytes=3 * 2**20,
        is_current=is_current,
    )


def display_to(output: io.StringIO, *, is_terminal: bool) -> PullDisplay:
    return PullDisplay(Console(file=output, force_terminal=is_terminal, width=120))


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert format_columns([("a", "bb", ""), ("ccc", "d", "e")]) == "a    bb\nccc  d   e"


@pytest.mark.parametrize(
    ("cached", "state", "size"),
    [
        ([], "not pulled", "88.6 MiB"),
        ([stored(NAME, is_current=True)], "pulled", "3.00 MiB"),
        ([stored(NAME, is_current=False)], "outdated", "3.00 MiB"),
    ],
)
def test_catalogue_is_listed_with_its_state(
    cached: list[StoredModel], state: str, size: str
) -> None:
    row = models_as_text({NAME: MODELS[NAME]}, cached).splitlines()[1]

    assert row.startswith(NAME)
    assert f"  {state}  " in row
    assert f"  {size}  " in row
    assert row.endswith(MODELS[NAME].description)


def test_cached_models_that_left_the_catalogue_are_listed_too() -> None:
    row = models_as_text({}, [stored("old", is_current=False)]).splitlines()[1]

    assert row.split()[:2] == ["old", "outdated"]
    assert row.endswith("from an/origin; no longer in the catalogue")


def test_pull_without_a_terminal_prints_one_line_per_stage() -> None:
    output = io.StringIO()
    with display_to(output, is_terminal=False) as display:
        for done in (0.0, 0.5, 1.0):
            message = f"converting {done} of [it]"
            display(PullProgress(name="m", stage="converting", message=message, fraction=done))
        display(PullProgress(name="m", stage="done", message="ready"))

    assert output.getvalue().splitlines() == ["converting 0.0 of [it]", "ready"]


def test_pull_on_a_terminal_draws_its_message() -> None:
    output = io.StringIO()
    with display_to(output, is_terminal=True) as display:
        display(PullProgress(name="m", stage="converting", message="converting m", fraction=0.5))

    assert "converting m" in output.getvalue()


def test_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with (
        display_to(io.StringIO(), is_terminal=False) as display,
        pytest.raises(ModelNotFoundError, match=NAME),
    ):
        pull(ModelStore(tmp_path), "nosuch", display)


def test_hub_id_is_fetched_into_the_cache(tmp_path: Path) -> None:
    fetched: list[str] = []

    def fetch(repo_id: str, cache_dir: Path) -> Path:
        fetched.append(repo_id)
        cache_dir.mkdir(parents=True)
        (cache_dir / "config.json").write_text("{}")
        (cache_dir / "model.safetensors").write_text("")
        return cache_dir

    with display_to(io.StringIO(), is_terminal=False) as display:
        path = pull(ModelStore(tmp_path, fetch_snapshot=fetch), "some/model", display)

    assert fetched == ["some/model"]
    assert path == tmp_path / "hub"
