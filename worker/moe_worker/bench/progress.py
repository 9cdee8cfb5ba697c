"""How far a run is, on a terminal; elsewhere nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moe_worker.bench.measurement import Measurement


class Bar:
    """Shows the larger share of what ends a run: its requests or its time."""

    def __init__(self, console: Console, num_requests: int, duration_seconds: float) -> None:
        self._num_requests = num_requests
        self._duration_seconds = duration_seconds
        self._progress = Progress(
            BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=1.0)

    def show(self, measurement: Measurement, now_seconds: float) -> None:
        elapsed = now_seconds - measurement.began_seconds
        share = max(
            measurement.num_ended / self._num_requests, elapsed / self._duration_seconds
        )  # fmt: skip
        line = described(measurement, elapsed)
        self._progress.update(self._task, completed=min(1.0, share), description=line)

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield


def described(measurement: Measurement, elapsed_seconds: float) -> str:
    """One line about the run so far."""
    ended = measurement.num_ended
    rate = measurement.output_tokens / elapsed_seconds if elapsed_seconds > 0 else 0.0
    failed = f", {measurement.num_failed:,} failed" if measurement.num_failed else ""
    under_way = measurement.num_started - ended
    return f"{ended:,} ended{failed}, {under_way:,} under way, {rate:,.0f} tokens/s"
