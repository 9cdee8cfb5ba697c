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
    num_layers, num_ranks, _ = slots_LRS.shape
    if load_LE is None or load_LE.shape != (num_layers, int(slots_LRS.max()) + 1):
        return Placement.even(slots_LRS)
    return Placement(slots_LRS, best_fractions(load_LE, slots_LRS, np.ones(num_ranks)))
