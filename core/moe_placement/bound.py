"""Bound: what no placement can beat, whatever its copies and fractions.

Without it nobody knows whether an imbalance of 3 % is a poor plan or the best there is. Neighbours:
`score` (measures a placement), `split` (the best for a given placement), the planners, which stop
when they are close to it.

Shapes: L layers, E logical experts, R ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.score import LoadLE, RankLoadsLR

BoundL = npt.NDArray[np.float64]
GapL = npt.NDArray[np.float64]

BISECTIONS = 50
ROUNDING = 1e-12


def gap(loads_LR: RankLoadsLR, speeds_R: SpeedsR, bound_L: BoundL) -> GapL:
    """Largest load ÷ speed over the bound, minus one; 0 for a layer without load."""
    loaded_L = bound_L > 0
    largest_L = (loads_LR / speeds_R).max(axis=1)
    return np.where(loaded_L, largest_L / np.where(loaded_L, bound_L, 1.0) - 1.0, 0.0)


def lower_bound(
    load_LE: LoadLE,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    max_copies: int | None = None,
    min_copies: int = 1,
) -> BoundL:
    """No placement, evenly split or not, has a smaller largest load ÷ speed; 0 without load.

    The largest of what these ask for:
    * all ranks together carry all tokens, and a rank no more than its slots' worth of the most
      loaded experts (`_carried`);
    * an expert needs as many copies on different ranks as it takes the fastest to carry it, at
      least `min_copies`, and all copies need a slot (`_room`);
    * where every expert has one copy, some rank holds several of the most loaded (`_pigeonhole`).

    Tight (reached by `full_fractions`) with equal slots k ≥ 2, any two speeds alike, slots ≥
    experts + ranks − 1 and no limit of copies.

    Args:
        max_copies, min_copies: of each expert; max_copies absent = one on each rank.
    """
    usable_R = slots_R > 0
    slots_R, speeds_R = np.minimum(slots_R[usable_R], load_LE.shape[1]), speeds_R[usable_R]
    most = len(slots_R) if max_copies is None else min(max_copies, len(slots_R))
    fastest_R = np.cumsum(np.sort(speeds_R)[::-1])
    sorted_LE = -np.sort(-load_LE, axis=1)
    bound_L = np.maximum(
        _carried(sorted_LE, slots_R, speeds_R), sorted_LE[:, 0] / fastest_R[most - 1]
    )
    if most == 1 or int(slots_R.sum()) == load_LE.shape[1]:
        bound_L = np.maximum(bound_L, _pigeonhole(sorted_LE, slots_R, speeds_R))
        return np.asarray(bound_L)
    return _room(load_LE, bound_L, fastest_R[:most], int(slots_R.sum()), min_copies)


def _carried(sorted_LE: LoadLE, slots_R: SlotsR, speeds_R: SpeedsR) -> BoundL:
    """Least x with Σ over ranks of min(x · speed, load of its slots' worth of the most loaded
    experts) ≥ all tokens."""
    most_LR = np.cumsum(sorted_LE, axis=1)[:, slots_R - 1]
    total_L = sorted_LE.sum(axis=1)
    order_LR = np.argsort(most_LR / speeds_R, axis=1, kind="stable")
    capped_LR = np.take_along_axis(most_LR, order_LR, 1)
    speed_LR = speeds_R[order_LR]
    # The n ranks that fill up first are full; the others share the rest by speed.
    full_LR = np.cumsum(capped_LR, axis=1) - capped_LR
    rest_LR = speed_LR.sum(axis=1, keepdims=True) - (np.cumsum(speed_LR, axis=1) - speed_LR)
    return np.asarray(((total_L[:, None] - full_LR) / rest_LR).max(axis=1))


def _room(
    load_LE: LoadLE, bound_L: BoundL, fastest_N: SpeedsR, room: int, min_copies: int
) -> BoundL:
    """`bound_L`, raised until the copies that every expert then needs fit into the slots.

    An expert of load w needs n copies if n − 1 ranks of the fastest together carry less than w.
    """
    out_L = bound_L.copy()
    needed_L = _needed(load_LE, bound_L, fastest_N, min_copies)
    tight_L = np.flatnonzero((bound_L > 0) & (needed_L > room))
    load, low, high = load_LE[tight_L], bound_L[tight_L], load_LE[tight_L].max(axis=1)
    high = high / fastest_N[0]
    for _ in range(BISECTIONS):
        if not len(tight_L):
            break
        middle = (low + high) / 2
        fits = _needed(load, middle, fastest_N, min_copies) <= room
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    out_L[tight_L] = low
    return out_L


def _needed(
    load_LE: LoadLE, level_L: BoundL, fastest_N: SpeedsR, min_copies: int
) -> npt.NDArray[np.int64]:
    """Copies of all experts of a layer, int64 [L], if no rank carries more than level × speed."""
    wanted_LE = load_LE / np.where(level_L > 0, level_L, 1.0)[:, None] * (1 - ROUNDING)
    copies_LE = np.searchsorted(fastest_N, wanted_LE.ravel(), side="left") + 1
    copies_LE = np.maximum(copies_LE, min_copies).reshape(load_LE.shape)
    return np.asarray(copies_LE.sum(axis=1), dtype=np.int64)


def _pigeonhole(sorted_LE: LoadLE, slots_R: SlotsR, speeds_R: SpeedsR) -> BoundL:
    """One copy each: of the n·R + 1 most loaded experts n + 1 are on one rank. If they also fill
    all slots, the rest of that rank's slots hold at least the least loaded experts."""
    num_ranks, num_experts = len(slots_R), sorted_LE.shape[1]
    filled = int(slots_R.sum()) == num_experts
    least = int(slots_R.min()) if filled else 0
    down_LE = np.pad(np.cumsum(sorted_LE, axis=1), ((0, 0), (1, 0)))
    up_LE = np.pad(np.cumsum(sorted_LE[:, ::-1], axis=1), ((0, 0), (1, 0)))
    bound_L = np.zeros(len(sorted_LE))
    for extra in range((num_experts - 1) // num_ranks + 1):
        last = extra * num_ranks + 1
        together_L = down_LE[:, last] - down_LE[:, last - 1 - extra]
        rest_L = up_LE[:, max(least - 1 - extra, 0)]
        bound_L = np.maximum(bound_L, (together_L + rest_L) / speeds_R.max())
    return bound_L
