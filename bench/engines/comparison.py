"""From figures of all rounds to lines of the table: best and worst, ratios, goals, floors.

Pure. Ratios are of the best rounds. Neighbours: `rounds` brings figures, `floor` the least times,
`table` shows the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.engines import floor, workload
from bench.engines.floor import Sizes
from bench.engines.rounds import Measured

INVARIANT, LIBRARY = "batchInvariant", "batchInvariant: false"
GOALS: Mapping[tuple[str, str, str], float] = {
    ("decode-1", "nvfp4", "transformers"): 5.5,
    ("decode-4", "nvfp4", "transformers"): 4.5,
    ("decode-16", "nvfp4", "transformers"): 3.5,
    ("decode-64", "nvfp4", "transformers"): 3.3,
    ("decode-1", "nvfp4", "llama"): 0.75,
    ("decode-4", "nvfp4", "llama"): 1.2,
    ("decode-16", "nvfp4", "llama"): 1.4,
    ("decode-64", "nvfp4", "llama"): 1.6,
    ("prefill", INVARIANT, "transformers"): 0.7,
    ("prefill", LIBRARY, "transformers"): 1.0,
    ("context", "nvfp4", "llama"): 0.45,
    ("context", "nvfp4", "ours bf16"): 0.8,
}
"""Row, our variant, and whom it is compared with: at least so many times its tokens a second, or at
most that share of its time."""


@dataclass(frozen=True)
class Cell:
    """One engine's best variant in one row, over all rounds."""

    variant: str
    best: float
    worst: float
    unit: str
    touched: float | None = None
    """Experts a layer and step."""


@dataclass(frozen=True)
class Versus:
    other: Cell
    ratio: float
    """Ours ÷ other, of whatever the unit is."""
    goal: float | None
    more_is_better: bool

    @property
    def is_reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.more_is_better else self.ratio <= self.goal


@dataclass(frozen=True)
class Line:
    row: str
    ours: Cell | None
    others: Mapping[str, Versus | Cell]
    """By engine; a cell alone where ours was not measured."""
    floor: float | None
    """In the unit of the row."""

    @property
    def floor_share(self) -> float | None:
        """How near the best round came to it: 1 = there."""
        if self.floor is None or self.ours is None:
            return None
        return (
            self.ours.best / self.floor if _grows(self.ours.unit) else self.floor / self.ours.best
        )


@dataclass(frozen=True)
class Roof:
    """The best of all rounds."""

    read_bytes_per_second: float
    operations_per_second: float
    """Of the library's FP32 or BF16 product, whichever is faster."""
    product: str


def lines(
    measured: Sequence[Measured], of: Sizes, kv_bytes: Mapping[str, int], fastest: bool
) -> list[Line]:
    """`kv_bytes`: of a token, by our formats; `fastest`: by the fastest decile of steps."""
    roof = roof_of(measured)
    made = []
    for row in workload.ROWS:
        cells = _cells(measured, row, fastest)
        ours = [cell for (engine, _), cell in cells.items() if engine == "ours"]
        rivals = {
            engine: _best([cell for (who, _), cell in cells.items() if who == engine])
            for engine in dict.fromkeys(who for who, _ in cells)
            if engine not in ("ours", "roof")
        }
        for cell in ours or [None]:
            if cell is None and not rivals:
                continue
            if row == "context" and cell is not None and cell.variant == "nvfp4":
                bf16 = cells.get(("ours", "bf16"))
                rivals = rivals | ({"ours bf16": bf16} if bf16 else {})
            made.append(_line(row, cell, rivals, _floor(row, cell, of, kv_bytes, roof)))
    return made


def roof_of(measured: Iterable[Measured]) -> Roof:
    found: dict[str, float] = {}
    for each in measured:
        if each.engine == "roof":
            variant = each.figure.variant
            found[variant] = max(found.get(variant, 0.0), each.figure.value)
    product = max(("product fp32", "product bf16"), key=lambda name: found[name])
    return Roof(found["read"] * 1e9, found[product] * 1e9, product.removeprefix("product "))


def _cells(measured: Iterable[Measured], row: str, fastest: bool) -> dict[tuple[str, str], Cell]:
    found: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        if each.figure.row == row:
            found.setdefault((each.engine, each.figure.variant), []).append(each)
    return {key: _cell(rounds, fastest) for key, rounds in found.items()}


def _cell(rounds: Sequence[Measured], fastest: bool) -> Cell:
    figures = [each.figure for each in rounds]
    unit = figures[0].unit
    values = [
        figure.quick if fastest and figure.quick is not None else figure.value for figure in figures
    ]
    details = [figure.details or {} for figure in figures]
    touched = [of["touched"] for of in details if "touched" in of]
    low, high = min(values), max(values)
    best, worst = (high, low) if _grows(unit) else (low, high)
    mean = sum(touched) / len(touched) if touched else None
    return Cell(figures[0].variant, best, worst, unit, mean)


def _best(cells: Sequence[Cell]) -> Cell:
    return (max if _grows(cells[0].unit) else min)(cells, key=lambda cell: cell.best)


def _line(row: str, ours: Cell | None, rivals: Mapping[str, Cell], least: float | None) -> Line:
    if ours is None:
        return Line(row, None, rivals, least)
    others = {
        engine: Versus(
            rival, ours.best / rival.best, GOALS.get((row, ours.variant, engine)), _grows(ours.unit)
        )
        for engine, rival in rivals.items()
    }
    return Line(row, ours, others, least)


def _floor(
    row: str, ours: Cell | None, of: Sizes, kv_bytes: Mapping[str, int], roof: Roof
) -> float | None:
    if row == "prefill":
        operations = floor.prefill_operations(of, workload.PREFILL_TOKENS)
        return workload.PREFILL_TOKENS / (operations / roof.operations_per_second)
    if row.startswith("decode-"):
        batch, tokens, kv = int(row.removeprefix("decode-")), workload.PROMPT_TOKENS, "nvfp4"
    elif row == "context" and ours is not None:
        batch, tokens, kv = workload.CONTEXT_BATCH, workload.CONTEXT_TOKENS, ours.variant
    else:
        return None
    touched = ours.touched if ours is not None else None
    if touched is None:
        touched = floor.touched_by_chance(of, batch)
    needed = floor.decode_bytes(of, touched, batch * tokens, kv_bytes[kv])
    seconds = needed / roof.read_bytes_per_second
    return seconds * 1e3 if row == "context" else batch / seconds


def _grows(unit: str) -> bool:
    """Whether more of it is better."""
    return unit == "tok/s"
