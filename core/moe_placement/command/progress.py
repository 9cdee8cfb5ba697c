"""A bar on stderr while a run lasts longer than a second; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_SECONDS = 1.0


class Bar:
    """`with Bar("planning") as bar: …; bar.advance(3)`. Without a total it only shows time."""

    def __init__(self, label: str, total: int | None = None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._drawn: tuple[Progress, TaskID] | None = None
        self._timer = threading.Timer(SHOW_AFTER_SECONDS, self._draw)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        if self._drawn is not None:
            self._drawn[0].stop()

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        if self._drawn is not None:
            progress, task = self._drawn
            progress.update(task, completed=self._done)

    def _draw(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from moe_placement.command.tables import make_console

        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
            console=make_console(stderr=True), transient=True,
        )  # fmt: skip
        task = progress.add_task(self._label, total=self._total, completed=self._done)
        self._drawn = (progress, task)
        progress.start()
