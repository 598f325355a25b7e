"""Shows a session's results on standard output, and a bar on standard error if it is a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deployments.bench.report import point_as_text, versus_as_text
from deployments.bench.session import PointResult, VersusResult

__all__ = ["BenchDisplay"]


class BenchDisplay:
    """`Observer` for people."""

    def __init__(self, console: Console, write: Callable[[str], None]) -> None:
        """`write` takes the text of results, `console` the bar."""
        self._console = console
        self._write = write
        self._progress: Progress | None = None

    def begin(self, label: str, total: int | None) -> None:
        """See `Observer`."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Few refreshes: the bar shares the cores with what is measured.
            refresh_per_second=2,
            disable=not self._console.is_terminal,
        )
        self._progress.add_task(label, total=total)
        self._progress.start()

    def advance(self) -> None:
        """See `Observer`; warm-up requests have no bar."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def end(self) -> None:
        """See `Observer`; harmless where nothing began."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None

    def point_done(self, point: PointResult) -> None:
        """See `Observer`."""
        self._write(f"\n{point_as_text(point)}")

    def versus_done(self, result: VersusResult) -> None:
        """See `Observer`."""
        self._write(f"\n{versus_as_text(result)}")

    def skipped(self, label: str) -> None:
        """See `Observer`."""
        self._write(f"\n{label}\n  not measured: --max-seconds was up")
