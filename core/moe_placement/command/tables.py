"""What people see: aligned tables and bars, in colours on a terminal only, one screen.

The width is the terminal's or COLUMNS, else 80. rich is imported when the first table is made.

Shapes: R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_placement.command import bars
from moe_placement.command.usage import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

MAX_ROWS = 16
"""Ranks that get a row of their own; more of them become a strip."""
MAX_STRIP = 512
STRIP_WIDTH = 64
WARM, HOT = 1.05, 1.25
MIN_WIDTH = 60
"""Where there are fewer columns, the terminal breaks lines: it loses no digits."""
BAR_WIDTH = 32
BESIDE_BAR = 36
"""Columns for what stands before a bar."""


def show(*parts: RenderableType) -> None:
    """Print the parts on stdout, an empty line between them."""
    console = make_console()
    width = console.width
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.width = max(width, getattr(part, "min_width", None) or 0)
        console.print(part, crop=False)


def show_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def make_console(*, stderr: bool = False) -> Console:
    """Raises UsageError naming the extra when rich is missing."""
    try:
        from rich.console import Console

        class PlainConsole(Console):
            """Leaves a closed pipe to `main`; rich would end with code 1."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

    except ModuleNotFoundError as error:
        raise UsageError(
            "tables need rich: pip install 'moe-operator[plan]', or use --json"
        ) from error
    console = PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)
    return console


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: int = 1,
    wrap: Sequence[int] = (),
) -> Table:
    """Columns without borders.

    The first `left` of them, those that `wrap` names and those without a heading begin left;
    numbers end right. Only the columns of `wrap` are broken into lines. Where the rest is too wide
    headings are stacked; digits are never cut, sooner the terminal breaks the line.
    """
    from rich.table import Table

    cells = list(rows)
    if _width(headings, cells, wrap) > make_console().width:
        headings = [heading.replace(" ", "\n") for heading in headings]
    out = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headings))
    out.min_width = _width(headings, cells, wrap)
    for place, heading in enumerate(headings):
        is_text = place < left or place in wrap or not heading
        out.add_column(heading, justify="left" if is_text else "right", no_wrap=place not in wrap)
    for row in cells:
        out.add_row(*row)
    return out


def _width(
    headings: Sequence[str], rows: Sequence[Sequence[str | Text]], wrap: Sequence[int]
) -> int:
    """Characters of a line with every cell whole, or in the columns of `wrap` every word; a row may
    leave out its last cells."""
    widths = [max(map(len, heading.split("\n"))) for heading in headings]
    for row in rows:
        for place, cell in enumerate(row):
            words = str(cell).split() if place in wrap else [cell]
            widths[place] = max([widths[place], *map(len, words)])
    return sum(widths) + 2 * (len(widths) - 1)


def text(line: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(line, style=style)


def graded(value: float, shown: str) -> Text:
    """`shown` in the colour of an imbalance of `value`."""
    return text(shown, "red" if value > HOT else "yellow" if value > WARM else "green")


def rank_bars(
    relative_R: npt.NDArray[np.float64], tokens_R: npt.NDArray[np.float64], domains_R: Sequence[int]
) -> Table:
    """Bars of rank loads.

    Args:
        relative_R: load ÷ (speed × mean); NaN where a rank takes no part.
    """
    if len(relative_R) > MAX_ROWS:
        return _strips(relative_R)
    several = len(set(domains_R)) > 1
    largest = float(np.nanmax(relative_R, initial=0.0))
    width = min(BAR_WIDTH, make_console().width - BESIDE_BAR)
    rows = []
    for rank, value in enumerate(relative_R.tolist()):
        takes_part = not np.isnan(value)
        rows.append(
            [
                str(rank),
                str(domains_R[rank]) if several else "",
                f"{tokens_R[rank]:,.0f}" if takes_part else "–",
                f"{value:.3f}" if takes_part else "–",
                graded(value, bars.bar(value, largest, width)) if takes_part else "not in the plan",
            ]
        )
    headings = ["rank", "domain" if several else "", "tokens", "÷ mean", ""]
    return table(headings, rows, left=0)


def _strips(relative_R: npt.NDArray[np.float64]) -> Table:
    values_R, size = bars.joined(relative_R, MAX_STRIP)
    rows: list[Sequence[str | Text]] = []
    for number, line in enumerate(bars.strip(values_R, STRIP_WIDTH)):
        first = number * STRIP_WIDTH * size
        last = min(first + len(line) * size, len(relative_R)) - 1
        rows.append([f"{first}–{last}", graded(float(np.nanmax(relative_R, initial=0.0)), line)])
    legend = "height = load ÷ fullest rank" + (f", {size} ranks each" if size > 1 else "")
    return table(["ranks", legend], rows, left=2)


def count(number: int, what: str) -> str:
    """1 wave, 2 waves."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def percent(value: float, digits: int = 2) -> str:
    """0.0312 as 3.12 %, and never -0.00 %."""
    return f"{value * 100:z.{digits}f} %"


def size(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number from 1 to 999."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
