"""Pictures: a heat map of rank loads before and after a plan, imbalance over time in a replay.

matplotlib is imported when the first picture is drawn; it is not needed for anything else.

Shapes: L MoE layers, R ranks, W windows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_placement.command import outputs
from moe_placement.command.usage import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLAG = "--plot"
SUFFIXES = (".png", ".svg")
RelativeLR = npt.NDArray[np.float64]


def check(path: Path | None) -> None:
    """Before the work begins: can the picture be drawn and written?"""
    outputs.check(FLAG, path, SUFFIXES)
    if path is not None:
        _figure(1, 1)


def heat_maps(path: Path, relative: Mapping[str, RelativeLR]) -> None:
    """Rank loads of each layer, side by side on one scale.

    Args:
        relative: load ÷ fair share, by what the map shows; NaN where a rank takes no part.
    """
    figure = _figure(5.2 * len(relative) + 1, 5.5)
    panels = figure.subplots(1, len(relative), squeeze=False, sharey=True)[0]
    highest = max(float(np.nanmax(values, initial=1.0)) for values in relative.values())
    for panel, (name, values_LR) in zip(panels, relative.items(), strict=True):
        image = panel.imshow(
            values_LR, aspect="auto", interpolation="nearest", cmap="YlOrRd", vmin=0, vmax=highest
        )
        worst = float(np.nanmax(values_LR, initial=1.0))
        panel.set_title(f"{name}: imbalance {worst:.3f}")
        panel.set_xlabel("rank")
    panels[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=list(panels), shrink=0.9)
    bar.set_label("tokens of the rank ÷ fair share")
    _save(figure, path)


def over_time(
    path: Path, imbalance: Mapping[str, Sequence[float]], moves: Mapping[str, Sequence[int]]
) -> None:
    """Imbalance of each window above, weights moved in it below, a line for each policy."""
    figure = _figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for name, values in imbalance.items():
        windows = np.arange(len(values))
        (line,) = above.plot(windows, values, label=name, linewidth=1.6)
        below.step(windows, moves[name], where="mid", color=line.get_color(), linewidth=1.2)
    above.set_ylabel("imbalance (1 = perfect)")
    above.set_ylim(bottom=1.0)
    above.grid(alpha=0.3)
    above.legend(frameon=False)
    below.set_ylabel("weights moved")
    below.set_xlabel("window")
    below.grid(alpha=0.3)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(f"{FLAG} needs matplotlib: pip install 'moe-operator[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "moe-plan"}):  # the same picture has the same bytes
        figure.savefig(
            content, format=path.suffix[1:], dpi=120,
            metadata={"Date": None} if path.suffix == ".svg" else None,
        )  # fmt: skip
    outputs.write(FLAG, path, content.getvalue())
