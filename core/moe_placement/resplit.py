"""A placement made without planning — first, repaired, with newcomers — gets its fractions.

Neighbours: `initial` and `membership` say which expert is in which slot, `split` finds fractions.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.placement import Placement
from moe_placement.score import LoadLE
from moe_placement.split import best_fractions


def resplit(slots_LRS: SlotsLRS, load_LE: LoadLE | None) -> Placement:
    """The best split for the load known last; even when none is known, or one of another model.

    Args:
        slots_LRS: complete, every expert has a slot.
    """
    known_LE = fitting(load_LE, slots_LRS)
    if known_LE is None:
        return Placement.even(slots_LRS)
    speeds_R = np.ones(slots_LRS.shape[1])
    return Placement(slots_LRS, best_fractions(known_LE, slots_LRS, speeds_R))


def fitting(load_LE: LoadLE | None, slots_LRS: SlotsLRS) -> LoadLE | None:
    """The load, if it has the placement's layers and experts."""
    shape = (len(slots_LRS), int(slots_LRS.max()) + 1)
    return load_LE if load_LE is not None and load_LE.shape == shape else None
