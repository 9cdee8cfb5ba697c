"""The best even split there is, for few experts: numbers of copies and places, searched together.

With eight experts (Mixtral) copies are coarse and what heuristics miss is several percent. Here
every number of copies that could still be better than the plan at hand is considered, in the order
of a bound that its copies cannot beat, and packed (`exact_even_pack`). The work is bounded; the
answer says of each layer whether it is proven to be the optimum. Neighbour: `full_even`, which asks
when there are few experts.

Shapes: L layers, E logical experts, R ranks, S slots a rank, V numbers of copies, C copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.bound import lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.even.exact_even_pack import Packing, Stopped
from moe_placement.even.full_even_counts import ROUNDING, finest
from moe_placement.even.full_even_deal import deal
from moe_placement.even.full_even_heap import least_heap
from moe_placement.score import LoadLE

Floats = npt.NDArray[np.float64]
CopiesVE = npt.NDArray[np.int64]

MAX_EXPERTS = 16
MAX_RANKS = 64
MAX_VECTORS = 20_000
"""Numbers of copies to look at in a layer."""
MAX_WORK = 6_000
"""Experts tried for ranks in a layer."""
BETTER = 1e-9
"""A plan that gains less counts as equal."""


@dataclass(frozen=True, eq=False)
class Exact:
    slots_LRS: SlotsLRS
    proven_L: npt.NDArray[np.bool_]
    """Whether no even split of the layer has a smaller largest load ÷ speed; False = the work
    allowed ended first."""


def plan(
    load_LE: LoadLE,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
    known_LRS: SlotsLRS | None = None,
) -> Exact:
    """The best even split of each layer.

    Args:
        known_LRS: a valid plan to start from, width max(slots_R) or more: the better it is, the
            less there is to search.
    """
    slots_R = np.minimum(slots_R, load_LE.shape[1])
    limits = limits.within_reach(load_LE.shape[1], slots_R)
    if known_LRS is None:
        counts_LE = finest(load_LE, slots_R, limits)
        known_LRS = deal(load_LE, counts_LE, slots_R, speeds_R, limits, in_rounds=False)
    bound_L = lower_bound(load_LE, slots_R, speeds_R, limits.max_copies, limits.min_copies)
    slots_LRS, proven_L = known_LRS.copy(), np.zeros(len(load_LE), dtype=np.bool_)
    for layer in range(len(load_LE)):
        found, proven_L[layer] = _best(
            load_LE[layer], slots_LRS[layer], slots_R, speeds_R, limits, float(bound_L[layer])
        )
        for rank, experts in enumerate(found or []):
            slots_LRS[layer, rank] = -1
            slots_LRS[layer, rank, : len(experts)] = experts
    return Exact(slots_LRS, proven_L)


def _best(
    load_E: Floats,
    known_RS: npt.NDArray[np.int32],
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
    bound: float,
) -> tuple[list[list[int]] | None, bool]:
    """(experts of each rank if better than the known plan, whether it is the optimum)."""
    found: list[list[int]] | None = None
    level = _level(load_E, known_RS, speeds_R)
    if level <= bound * (1 + BETTER):
        return None, True
    most = limits.most(int((slots_R > 0).sum()))
    fewest_E = np.maximum(
        limits.min_copies, np.ceil(load_E / (level * speeds_R.max()) * (1 - ROUNDING))
    )
    extra = int(slots_R.sum() - fewest_E.sum())
    if extra < 0:
        return None, True
    if len(load_E) > MAX_EXPERTS or len(slots_R) > MAX_RANKS:
        return None, False
    if comb(extra + len(load_E), len(load_E)) > MAX_VECTORS:
        return None, False
    counts_VE = fewest_E.astype(np.int64) + _extras(len(load_E), extra)
    counts_VE = counts_VE[(counts_VE <= most).all(axis=1)]
    bound_V = np.maximum(bound, _bounds(load_E, counts_VE, slots_R, speeds_R))
    work = [MAX_WORK]
    for row in np.argsort(bound_V, kind="stable").tolist():
        if bound_V[row] >= level * (1 - BETTER):
            break
        counts = tuple(counts_VE[row].tolist())
        shares = (load_E / counts_VE[row]).tolist()
        packing = Packing(shares, slots_R.tolist(), speeds_R.tolist(), work)
        # First whether the bound itself can be had, then anything better than the plan at hand.
        try:
            places = packing.places(counts, bound_V[row])
            while places is None and (better := packing.places(counts, level * (1 - BETTER))):
                found, level = better, _height(better, shares, speeds_R)
            if places is not None:
                found, level = places, _height(places, shares, speeds_R)
        except Stopped:
            return found, False
    return found, True


def _height(places: list[list[int]], shares: list[float], speeds_R: SpeedsR) -> float:
    loads = [sum(shares[expert] for expert in held) for held in places]
    return float((np.asarray(loads) / speeds_R).max())


def _level(load_E: Floats, slots_RS: npt.NDArray[np.int32], speeds_R: SpeedsR) -> float:
    counts_E = np.bincount(slots_RS[slots_RS >= 0], minlength=len(load_E))
    share_F = np.append(load_E / counts_E, 0.0)
    return float((share_F[slots_RS].sum(axis=1) / speeds_R).max())


def _bounds(load_E: Floats, counts_VE: CopiesVE, slots_R: SlotsR, speeds_R: SpeedsR) -> Floats:
    """A level below which so many copies of each expert cannot be placed, [V]."""
    alike = bool((slots_R == slots_R[0]).all() and (speeds_R == speeds_R[0]).all())
    share_VC = _descending(load_E, counts_VE, int(slots_R.sum()))
    heap_V = least_heap(share_VC, len(slots_R), int(slots_R[0]) if alike else None)
    return np.asarray(np.maximum(heap_V / speeds_R.max(), load_E.sum() / speeds_R.sum()))


def _descending(load_E: Floats, counts_VE: CopiesVE, room: int) -> Floats:
    """Load of each copy, most loaded first, 0 for free slots, [V, C] with C = `room`."""
    filled_VC = np.arange(room) < counts_VE.sum(axis=1)[:, None]
    share_VC = np.zeros((len(counts_VE), room))
    share_VC[filled_VC] = np.repeat((load_E / counts_VE).ravel(), counts_VE.ravel())
    return -np.sort(-share_VC, axis=1)


@cache
def _extras(num_experts: int, most: int) -> CopiesVE:
    """All ways to hand out up to `most` further copies, [V, E]."""
    rows = np.zeros((1, 0), dtype=np.int64)
    for _ in range(num_experts):
        left_V = most - rows.sum(axis=1)
        again = np.repeat(np.arange(len(rows)), left_V + 1)
        first_V = np.cumsum(left_V + 1) - (left_V + 1)
        more = np.arange(len(again)) - first_V[again]
        rows = np.column_stack([rows[again], more])
    return rows
