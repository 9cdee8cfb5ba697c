"""How many copies each expert gets, before anybody says where: one candidate after another.

Splitting as much as the slots allow makes all copies small, which packs well as long as no copy
fills half a rank. With a few very hot experts it does not: a rank takes one of their copies and is
left with room that only many light experts could fill. Then fewer copies, each nearly a rank's
worth, and free slots beside them pack better. Which it is depends on the load, so `full_even`
tries both and what is in between. Neighbour: `full_even_deal` puts the copies on ranks.

Shapes: L layers, E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moe_placement.bound import BoundL
from moe_placement.capacity import SlotsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import CopiesLE
from moe_placement.score import LoadLE

BISECTIONS = 50
ROUNDING = 1e-9
FIRST_CAPS = (0.04, 0.02, 0.0, 0.06)
"""Tried around the cap that leaves room for the lightest experts beside the hottest copies."""
OTHER_CAPS = (0.9, 0.8, 1.0, 0.7, 0.6, 0.5, 1.05, 0.4)


def finest(load_LE: LoadLE, slots_R: SlotsR, limits: CopyLimits) -> CopiesLE:
    """As many copies as fit, each next one to the largest share: the largest share is the smallest
    possible. Experts without load get the fewest copies."""
    most = limits.most(int((slots_R > 0).sum()))
    room = int(slots_R.sum())
    low_L, high_L = np.zeros(len(load_LE)), load_LE.max(axis=1)
    for _ in range(BISECTIONS):
        middle_L = (low_L + high_L) / 2
        fits_L = capped(load_LE, middle_L, limits.min_copies, most).sum(axis=1) <= room
        low_L, high_L = np.where(fits_L, low_L, middle_L), np.where(fits_L, middle_L, high_L)
    counts_LE = capped(load_LE, high_L, limits.min_copies, most)
    layers = np.arange(len(load_LE))
    while True:
        share_LE = np.where(counts_LE < most, load_LE / counts_LE, 0.0)
        expert_L = share_LE.argmax(axis=1)
        more_L = (counts_LE.sum(axis=1) < room) & (share_LE[layers, expert_L] > 0)
        if not more_L.any():
            return counts_LE
        counts_LE[layers[more_L], expert_L[more_L]] += 1


def capped(load_LE: LoadLE, cap_L: BoundL, fewest: int, most: int) -> CopiesLE:
    """The fewest copies that keep every share at or below the cap, within the limits."""
    cap_L = np.maximum(cap_L, np.finfo(np.float64).tiny)
    wanted_LE = np.ceil(np.minimum(load_LE / cap_L[:, None], most) * (1 - ROUNDING))
    return np.maximum(wanted_LE, fewest).astype(np.int64)


def caps(
    load_LE: LoadLE, level_L: BoundL, slots_R: SlotsR
) -> Iterator[tuple[npt.NDArray[np.float64], bool]]:
    """(caps [L] in units of `level_L`, whether they are more than a guess), best first."""
    slots = max(1, int(slots_R.max()))
    share_LE = load_LE / np.where(level_L > 0, level_L, 1.0)[:, None]
    hot_L = np.where(share_LE > 1, np.ceil(share_LE), 0).sum(axis=1).astype(np.int64)
    lightest_LE = np.pad(np.cumsum(np.sort(share_LE, axis=1), axis=1), ((0, 0), (1, 0)))
    beside_L = np.clip(hot_L * (slots - 1), 1, load_LE.shape[1])
    light_L = lightest_LE[np.arange(len(load_LE)), beside_L] / beside_L
    fitting_L = np.clip(1.0 - (slots - 1) * light_L, 0.5, 1.0)
    for offset in FIRST_CAPS:
        yield fitting_L + offset, True
    for cap in OTHER_CAPS:
        yield np.full(len(load_LE), cap), False


def within(counts_LE: CopiesLE, slots_R: SlotsR) -> npt.NDArray[np.bool_]:
    """Whether the slots hold so many copies, bool [L]."""
    return np.asarray(counts_LE.sum(axis=1) <= int(slots_R.sum()))
