"""The lines of a run as a table of at most 100 columns, and what does not fit in one below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from bench.engines.comparison import INVARIANT, LIBRARY, Cell, Line, Roof, Versus

OURS_BF16 = "ours bf16"
TITLES = {
    "prefill": "prefill 512",
    "context": "2k context, B=16",
    "arrivals": "16 users come and go",
    "ttft": "first token under load",
    "warm-up": "kernels ready",
}
VARIANTS = {LIBRARY: ", not invariant"}


def render(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("ours", justify="right")
    for name in ("transformers", "llama.cpp"):
        table.add_column(name, justify="right")
        table.add_column("×", justify="right")
        table.add_column("goal", justify="right")
    table.add_column("floor", justify="right")
    table.add_column("of it", justify="right")
    table.add_column("experts", justify="right")
    for line in lines:
        share = line.floor_share
        touched = line.ours.touched if line.ours is not None else None
        table.add_row(
            title(line),
            _cell(line.ours),
            *_versus(line, "transformers"),
            *_versus(line, "llama"),
            "" if line.floor is None else _number(line.floor),
            "" if share is None else f"{share:.0%}",
            "" if touched is None else f"{touched:.1f}",
        )
    return table


def title(line: Line) -> str:
    name = TITLES.get(line.row) or line.row.replace("-", " B=")
    if line.ours is None:
        return name
    if line.row in ("context", "warm-up"):
        return f"{name}, {line.ours.variant}"
    return name + VARIANTS.get(line.ours.variant, "")


def below(lines: Sequence[Line], roof: Roof) -> list[Text]:
    """What the columns have no place for."""
    told = [
        "best round (worst) of tokens a second, or of the time where a unit stands; × is ours ÷ "
        "theirs of the best rounds; ✓ reached, ✗ missed",
        f"floor: bytes ÷ {roof.read_bytes_per_second / 1e9:.1f} GB/s read in this run; prefill: "
        f"operations ÷ {roof.operations_per_second / 1e9:.0f} GFLOP/s of the library's "
        f"{roof.product} product",
    ]
    for line in lines:
        against = line.others.get(OURS_BF16)
        if isinstance(against, Versus):
            told.append(
                f"2k context: a step with KV nvfp4 takes {against.ratio:.2f} of the one with bf16 "
                f"({_goal(against)})"
            )
    price = invariance_price(lines)
    if price is not None:
        told.append(f"batch invariance: prefill runs at {price:.2f} of what it does without")
    return [Text(line, style="dim") for line in told]


def invariance_price(lines: Sequence[Line]) -> float | None:
    """Prefill with batchInvariant ÷ prefill without, of the best rounds."""
    ours = {
        line.ours.variant: line.ours.best for line in lines if line.row == "prefill" and line.ours
    }
    if INVARIANT not in ours or LIBRARY not in ours:
        return None
    return ours[INVARIANT] / ours[LIBRARY]


def _versus(line: Line, engine: str) -> tuple[str | Text, ...]:
    found = line.others.get(engine)
    if found is None:
        return "–", "", ""
    if isinstance(found, Cell):
        return f"{_cell(found)} {found.variant}", "", ""
    style = {True: "green", False: "red", None: ""}[found.is_reached]
    return (
        f"{_cell(found.other)} {found.other.variant}",
        f"{found.ratio:.2f}",
        Text(_goal(found), style=style),
    )


def _goal(found: Versus) -> str:
    if found.goal is None:
        return ""
    sign = "≥" if found.more_is_better else "≤"
    return f"{sign}{found.goal:g} {'✓' if found.is_reached else '✗'}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    unit = "" if cell.unit == "tok/s" else f" {cell.unit}"
    if cell.best == cell.worst:
        return f"{_number(cell.best)}{unit}"
    return f"{_number(cell.best)} ({_number(cell.worst)}){unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
