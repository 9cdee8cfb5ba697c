"""Rank loads as characters: a bar for each of a few ranks, a strip for many.

Neighbours: `tables` gives them colours.

Shapes: R ranks, N characters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = " ▁▂▃▄▅▆▇█"
ABSENT = "×"


def bar(value: float, largest: float, width: int) -> str:
    """`value` as a bar of at most `width` characters, `largest` filling all of them."""
    if not largest > 0 or not value > 0:
        return ""
    eighths = min(max(round(value / largest * width * 8), 1), width * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def strip(values_R: npt.NDArray[np.float64], width: int) -> list[str]:
    """One character a rank, as high as its value ÷ the largest; NaN = no such rank.

    Returns lines of at most `width` characters.
    """
    largest = float(np.nanmax(values_R, initial=0.0))
    text = "".join(_height(value, largest) for value in values_R.tolist())
    return [text[start : start + width] for start in range(0, len(text), width)]


def joined(values_R: npt.NDArray[np.float64], most: int) -> tuple[npt.NDArray[np.float64], int]:
    """At most `most` values, each the largest of so many neighbours, and how many that are."""
    size = -(-len(values_R) // most)
    if size == 1:
        return values_R, 1
    padded = np.full(-(-len(values_R) // size) * size, -np.inf)
    padded[: len(values_R)] = np.where(np.isnan(values_R), -np.inf, values_R)
    largest_N = padded.reshape(-1, size).max(axis=1)
    return np.where(np.isneginf(largest_N), np.nan, largest_N), size


def _height(value: float, largest: float) -> str:
    if np.isnan(value):
        return ABSENT
    if not largest > 0 or not value > 0:
        return HEIGHTS[0]
    return HEIGHTS[min(max(round(value / largest * 8), 1), 8)]
