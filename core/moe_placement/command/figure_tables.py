"""Tables of `figures`: the plan in four lines, its worst layers, the ranks of one layer.

Neighbours: `figures` (the values), `tables` (columns and colours).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_placement.capacity import DomainsR
from moe_placement.command import tables
from moe_placement.command.figures import Figures, FiguresL

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_LAYERS = 8


def summary(found: Mapping[str, Figures]) -> Table:
    """Worst layer and mean of the layers; a pair of columns for each of the plans compared."""
    headings = [""]
    for name in found:
        headings += [f"{name} worst".strip(), f"{name} mean".strip()]
    rows = [["imbalance"], ["balancedness"], ["excess"], ["gap to the bound"]]
    for figures in found.values():
        imbalance_L = figures.imbalance_L
        rows[0] += [f"{imbalance_L.max():.3f}", f"{imbalance_L.mean():.3f}"]
        rows[1] += [f"{1 / imbalance_L.max():.3f}", f"{(1 / imbalance_L).mean():.3f}"]
        rows[2] += _percents(imbalance_L - 1)
        rows[3] += _percents(figures.gap_L)
    return tables.table(headings, rows)


def layers(found: Figures, most: int = MAX_LAYERS) -> Table:
    """The layers with the largest imbalance."""
    order = np.argsort(-found.imbalance_L, kind="stable")[:most].tolist()
    rows: list[Sequence[str | Text]] = [
        [
            str(layer),
            f"{found.tokens_LR[layer].sum():,.0f}",
            tables.graded(found.imbalance_L[layer], f"{found.imbalance_L[layer]:.3f}"),
            f"{1 / found.imbalance_L[layer]:.3f}",
            tables.percent(found.imbalance_L[layer] - 1),
            tables.percent(found.gap_L[layer]),
            f"{found.largest_L[layer]:,.0f}",
            f"{found.bound_L[layer]:,.0f}",
        ]
        for layer in order
    ]
    headings = ["layer", "tokens", "imbalance", "balanced", "excess", "gap", "largest", "bound"]
    return tables.table(headings, rows, left=0)


def ranks(found: Figures, layer: int, domains_R: DomainsR) -> Table:
    """Bars of the rank loads of one layer."""
    return tables.rank_bars(found.relative_LR[layer], found.tokens_LR[layer], domains_R.tolist())


def _percents(values_L: FiguresL) -> list[str]:
    return [tables.percent(float(values_L.max())), tables.percent(float(values_L.mean()))]
