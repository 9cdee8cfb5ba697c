"""Which copies leave when a wave comes into force: as late as they may, never the last one.

Neighbours: `arrivals` chose who comes, `detours` steps in where no slot would be left.

Shapes: L MoE layers, E logical experts, R ranks, N copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.walk.remaining import Copies, Remaining

FlagsN = npt.NDArray[np.bool_]


def may_leave(left: Remaining, arriving: Copies) -> FlagsN:
    """Of the leaving copies, those without which their expert still has one after the switch.

    Where nothing that stays or comes has the expert, one copy is held back: on an open rank, where
    no arrival waits for its slot, on the lowest rank.
    """
    leaving = left.leaving
    at_LE = (leaving.layer_N, leaving.expert_N)
    may_N = (left.kept_LE + left.count_LE(arriving))[at_LE] > 0
    waiting_N = left.pending_LR[leaving.layer_N, leaving.rank_N] > 0
    order = np.lexsort(
        (leaving.rank_N, waiting_N, ~left.open_R[leaving.rank_N], leaving.expert_N, leaving.layer_N)
    )
    expert = leaving.layer_N[order] * left.copies_LE.shape[1] + leaving.expert_N[order]
    is_first = np.diff(expert, prepend=-1) != 0
    may_N[order[~is_first]] = True
    return may_N


def choose(left: Remaining, coming: Copies, may_N: FlagsN, max_rooms: int | None) -> FlagsN:
    """Of the leaving copies, those that go now: when all that the target wants of the expert is
    there, or where their rank needs a slot for its next arrival.

    Args:
        max_rooms: so many ranks at most get such a slot, lowest layers first: no more can be
        filled by the next wave.
    """
    leaving = left.leaving
    came_LR = left.count_LR(coming)
    missing_LE = left.count_LE(left.pending) - left.count_LE(coming)
    going_N = may_N & (missing_LE[leaving.layer_N, leaving.expert_N] == 0)
    free_LR = left.free_LR - came_LR + left.count_LR(leaving.where(going_N))
    needed_LR = (left.pending_LR > came_LR) & (free_LR < 1)
    # One for each such rank: that of the expert with most copies.
    spare_N = np.flatnonzero(may_N & ~going_N & needed_LR[leaving.layer_N, leaving.rank_N])
    spare = leaving.where(spare_N)
    copies_N = left.copies_LE[spare.layer_N, spare.expert_N]
    order = np.lexsort((spare.expert_N, -copies_N, spare.rank_N, spare.layer_N))
    place = spare.layer_N[order] * left.free_LR.shape[1] + spare.rank_N[order]
    first = spare_N[order[np.diff(place, prepend=-1) != 0]]
    going_N[first[:max_rooms]] = True
    return np.asarray(going_N)
