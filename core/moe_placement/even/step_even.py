"""From the plan in force towards balance in few moves, for engines that split tokens evenly.

Neighbours: `step_even_whole` repairs what is missing, `step_even_search` looks for moves,
`step_even_trail` picks those worth their cost, `step_even_seats` keeps slots; `full_even` plans
without a past.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.bound import lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import full_even
from moe_placement.even.step_even_search import Effort, search
from moe_placement.even.step_even_seats import seated
from moe_placement.even.step_even_whole import whole
from moe_placement.placement import received
from moe_placement.score import LoadLE

EFFORT = Effort()
MAX_SEARCHES = 8
"""A layer whose search ended with a gain but short of its goal is searched again from there."""


def improve(
    load_LE: LoadLE,
    current_LRS: SlotsLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
    goal: float,
    max_moves: int | None,
) -> SlotsLRS:
    """A placement whose gap is at most `goal` in every layer, or as near to it as moves that are
    worth it lead, int32 [L, R, max(S, max(slots_R))].

    A layer within the goal, or without load, is left as it is, so an unchanged load moves nothing.
    No layer gets worse, unless a copy it lacks has to come.

    Args:
        current_LRS: the plan in force; experts without a copy get one, ranks above their slots are
            relieved, and a layer without any copies is planned anew, whatever `max_moves` says.
        limits: min_copies counts as far as the slots allow.
        goal: largest load ÷ speed over the layer's bound, minus 1.
        max_moves: weights received in all layers together; absent = as many as help.
    """
    slots_R = np.minimum(slots_R, load_LE.shape[1])
    limits = limits.within_reach(load_LE.shape[1], slots_R)
    current_LRS = _wide(current_LRS, int(slots_R.max()))
    start_LRS = _started(load_LE, current_LRS, slots_R, speeds_R, limits)
    bound_L = lower_bound(load_LE, slots_R, speeds_R, limits.max_copies, limits.min_copies)
    target_L = bound_L * (1.0 + goal)
    left = None if max_moves is None else max(0, max_moves - received(current_LRS, start_LRS))
    now_LRS = seated(current_LRS, start_LRS)
    searched_L = np.arange(len(load_LE))
    for _ in range(MAX_SEARCHES):
        trail = search(
            load_LE[searched_L], now_LRS[searched_L], slots_R, speeds_R, limits,
            target_L[searched_L], EFFORT,
        )  # fmt: skip
        rounds_L = trail.best() if left is None else trail.within(left, target_L[searched_L])
        followed_LRS = trail.followed(rounds_L)
        # The next search starts from what a later call would find in force.
        now_LRS[searched_L] = seated(current_LRS[searched_L], followed_LRS)
        reached_L = np.stack(trail.peaks_TL)[rounds_L, np.arange(len(searched_L))] <= 1.0
        searched_L = searched_L[(rounds_L > 0) & ~reached_L]
        if left is not None or not len(searched_L):
            break
    return now_LRS


def _started(
    load_LE: LoadLE,
    current_LRS: SlotsLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    limits: CopyLimits,
) -> SlotsLRS:
    """A whole placement close to the current one."""
    out_LRS = current_LRS.copy()
    empty_L = ~(current_LRS >= 0).any(axis=(1, 2))
    if empty_L.any():
        planned_LRS = full_even.plan(load_LE[empty_L], slots_R, speeds_R, limits)
        out_LRS[empty_L] = _wide(planned_LRS, out_LRS.shape[2])
    return whole(load_LE, out_LRS, slots_R, speeds_R, limits)


def _wide(slots_LRS: SlotsLRS, width: int) -> SlotsLRS:
    """At least `width` slots a rank."""
    missing = max(0, width - slots_LRS.shape[2])
    return np.pad(slots_LRS, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
