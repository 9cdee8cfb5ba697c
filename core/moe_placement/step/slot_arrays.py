"""Slot arrays: from ranks to their slots and back, quickly.

numpy goes through a short last axis entry by entry; a matrix product and a repetition do not, which
is most of the time that a repair has. Neighbours: `repair`, `opening`, `residual`.

Shapes: L layers, R ranks, S slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def sum_slots(values_LRS: Floats) -> Floats:
    """[L, R], of each rank over its slots."""
    return np.asarray(values_LRS @ np.ones(values_LRS.shape[2]))


def any_slot(flags_LRS: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[L, R], whether any of a rank's slots is meant."""
    return sum_slots(flags_LRS.astype(np.float64)) > 0


def count_slots(flags_LRS: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[L, R], how many of a rank's slots are meant."""
    return sum_slots(flags_LRS.astype(np.float64)).astype(np.int64)


def to_slots(values_LR: Floats, num_slots: int) -> Floats:
    """[L, R, S], the rank's value for each of its slots."""
    return np.repeat(values_LR, num_slots, axis=1).reshape(*values_LR.shape, num_slots)
