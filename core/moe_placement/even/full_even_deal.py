"""Dealing: copies go to ranks, the largest first, and none to a rank that holds its expert.

In rounds: each gives every rank with a slot left one copy, the largest to the rank that lacks most,
so a whole round of all layers is one sort. Or one by one: each copy to the lightest rank with a
slot left, as the published method does, which takes longer and packs better where copies are small.
What dealing leaves uneven, `full_even_exchange` evens out.

Shapes: L layers, E logical experts, R ranks, S slots a rank, C copies of a layer, N ranks of a
round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import CopiesLE, copies
from moe_placement.score import LoadLE

IntsLC = npt.NDArray[np.int64]


def deal(
    load_LE: LoadLE,
    counts_LE: CopiesLE,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
    *,
    in_rounds: bool,
) -> SlotsLRS:
    """Places for so many copies of each expert, int32 [L, R, S] with S = max(slots_R).

    A copy that finds no rank without its expert is left out, unless that breaks `limits`: then the
    layer gets the fewest copies of every expert instead, which always have a place.

    Args:
        counts_LE: at most as many copies as there are slots.
    """
    dealt = _in_rounds if in_rounds else _one_by_one
    slots_LRS = dealt(load_LE, counts_LE, slots_R, speeds_R)
    short_L = (copies(slots_LRS, load_LE.shape[1]) < limits.min_copies).any(axis=1)
    if short_L.any():
        slots_LRS[short_L] = fewest(load_LE.shape[1], limits.min_copies, slots_R)
    return slots_LRS


def fewest(num_experts: int, min_copies: int, slots_R: SlotsR) -> npt.NDArray[np.int32]:
    """The same number of copies of every expert, int32 [R, S]: each on the ranks with most slots
    left, which finds a place for all if there is one (Gale and Ryser)."""
    slots_RS = np.full((len(slots_R), int(slots_R.max())), -1, dtype=np.int32)
    filled_R = np.zeros(len(slots_R), dtype=np.int64)
    usable_R = np.minimum(slots_R, num_experts)
    for expert in range(num_experts):
        ranks_N = np.argsort(filled_R - usable_R, kind="stable")[:min_copies]
        slots_RS[ranks_N, filled_R[ranks_N]] = expert
        filled_R[ranks_N] += 1
    return slots_RS


def _in_rounds(
    load_LE: LoadLE, counts_LE: CopiesLE, slots_R: SlotsR, speeds_R: SpeedsR
) -> SlotsLRS:
    expert_LC, share_LC = _copies_by_share(load_LE, counts_LE, int(slots_R.sum()))
    slots_LRS = np.full((len(load_LE), len(slots_R), int(slots_R.max())), -1, dtype=np.int32)
    lacks_LR = load_LE.sum(axis=1)[:, None] * (speeds_R / speeds_R.sum())
    rows = np.arange(len(load_LE))[:, None]
    dealt = 0
    for turn in range(slots_LRS.shape[2]):
        ranks_N = np.flatnonzero(slots_R > turn)
        expert_LN = expert_LC[:, dealt : dealt + len(ranks_N)].copy()
        order_LN = np.argsort(-lacks_LR[:, ranks_N], axis=1, kind="stable")
        if turn:
            holds_LN = (slots_LRS[:, ranks_N, :turn] == expert_LN[:, :1, None]).any(axis=2)
            order_LN = _strangers_first(expert_LN, holds_LN, order_LN)
        to_LN = ranks_N[order_LN]
        slots_LRS[rows, to_LN, turn] = expert_LN
        share_LN = share_LC[:, dealt : dealt + len(ranks_N)]
        lacks_LR[rows, to_LN] -= np.where(expert_LN >= 0, share_LN, 0.0)
        dealt += len(ranks_N)
    return slots_LRS


def _one_by_one(
    load_LE: LoadLE, counts_LE: CopiesLE, slots_R: SlotsR, speeds_R: SpeedsR
) -> SlotsLRS:
    expert_LC, share_LC = _copies_by_share(load_LE, counts_LE, int(slots_R.sum()))
    slots_LRS = np.full((len(load_LE), len(slots_R), int(slots_R.max())), -1, dtype=np.int32)
    load_LR = np.zeros(slots_LRS.shape[:2])
    filled_LR = np.zeros(slots_LRS.shape[:2], dtype=np.int64)
    last_LR = np.full(slots_LRS.shape[:2], -1)
    layers = np.arange(len(load_LE))
    for at in range(expert_LC.shape[1]):
        expert_L, share_L = expert_LC[:, at], share_LC[:, at]
        # Copies of an expert follow one another: a rank that holds it got it last.
        barred_LR = (filled_LR >= slots_R) | (last_LR == expert_L[:, None])
        level_LR = np.where(barred_LR, np.inf, (load_LR + share_L[:, None]) / speeds_R)
        rank_L = level_LR.argmin(axis=1)
        of_L = np.flatnonzero((expert_L >= 0) & np.isfinite(level_LR[layers, rank_L]))
        to = (of_L, rank_L[of_L])
        slots_LRS[*to, filled_LR[to]] = expert_L[of_L]
        filled_LR[to] += 1
        load_LR[to] += share_L[of_L]
        last_LR[to] = expert_L[of_L]
    return slots_LRS


def _copies_by_share(
    load_LE: LoadLE, counts_LE: CopiesLE, room: int
) -> tuple[IntsLC, npt.NDArray[np.float64]]:
    """Expert (−1 = none) and load of each copy, largest first, [L, C] with C = `room`."""
    share_LE = load_LE / counts_LE
    order_LE = np.argsort(-share_LE, axis=1, kind="stable")
    ends_LE = np.cumsum(np.take_along_axis(counts_LE, order_LE, 1), axis=1)
    begins_LC = np.zeros((len(load_LE), room + 1), dtype=np.int64)
    np.add.at(begins_LC, (np.arange(len(load_LE))[:, None], ends_LE), 1)
    which_LC = np.cumsum(begins_LC[:, :room], axis=1)
    exists_LC = which_LC < load_LE.shape[1]
    expert_LC = np.take_along_axis(order_LE, np.where(exists_LC, which_LC, 0), 1)
    share_LC = np.take_along_axis(share_LE, expert_LC, 1)
    return np.where(exists_LC, expert_LC, -1), np.where(exists_LC, share_LC, 0.0)


def _strangers_first(
    expert_LN: IntsLC, holds_LN: npt.NDArray[np.bool_], order_LN: IntsLC
) -> IntsLC:
    """The order with ranks that do not hold the first expert ahead where its copies are dealt.

    Copies that find only ranks which hold it are struck out of `expert_LN`.
    """
    first_L1 = expert_LN[:, :1]
    again_LN = (expert_LN == first_L1) & (first_L1 >= 0)
    stranger_LN = ~np.take_along_axis(holds_LN, order_LN, 1)
    ahead_LN = stranger_LN & (np.cumsum(stranger_LN, axis=1) <= again_LN.sum(axis=1, keepdims=True))
    order_LN = np.take_along_axis(order_LN, np.argsort(~ahead_LN, axis=1, kind="stable"), 1)
    expert_LN[again_LN & np.take_along_axis(holds_LN, order_LN, 1)] = -1
    return order_LN
