"""Incremental plan with fractions: from the placement in force, as few moves as the goal takes.

First what must be is put right (`repair`). Then, in layers whose best split misses the goal, the
sets of ranks that no split relieves are opened one after another by a copy elsewhere, until the
goal, the budget or the end of what helps (`step_fractions_search`). A layer at its goal is left
alone; one that cannot reach it gets as near as it can, or keeps what it had. Neighbours:
`full_fractions` (a plan from nothing), `split` (fractions alone), `recipe` (its caller).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; T layers still to do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.bound import lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import received
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions
from moe_placement.step.overflow import NOTHING
from moe_placement.step.step_fractions_search import Found, Rules, search
from moe_placement.walk import repair

Floats = npt.NDArray[np.float64]

WORTHWHILE = 1e-3
"""A layer that misses its goal is changed only if its fullest rank gets emptier by this part."""
HALVINGS = 4
"""How finely the nearest goal within reach is looked for."""
STEP = 0.6
"""With a budget, the worst layers are brought down first: to this part of what all are above
their goals, then to this part of that, and so on."""
STEPS = 12


def improve(
    load_LE: LoadLE,
    current_LRS: SlotsLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    copies: CopyLimits,
    goal: float,
    max_moves: int | None = None,
) -> tuple[SlotsLRS, FractionsLRS]:
    """Slots int32 and fractions float64, [L, R, max(S, most slots)].

    Args:
        current_LRS: may lack experts, and hold more than `slots_R` or `copies` allow: that is put
            right, whatever it costs. Who stays keeps its slot.
        goal: part of the bound by which the fullest rank of a layer may be above it.
        max_moves: experts that ranks may receive for balance, all layers together.

    Once whole, no layer ends up with a fuller fullest rank than its best split had before; what
    was improved once is not changed again while the load stays.
    """
    width = max(current_LRS.shape[2], int(slots_R.max()))
    wide_LRS = np.full((*current_LRS.shape[:2], width), -1, dtype=np.int32)
    wide_LRS[:, :, : current_LRS.shape[2]] = current_LRS
    start_LRS = repair.whole(load_LE, wide_LRS, slots_R, speeds_R, copies)
    rules = Rules(slots_R, speeds_R, copies)
    bound_L = lower_bound(load_LE, slots_R, speeds_R, copies.max_copies)
    target_L = (1 + goal) * bound_L / (1 + NOTHING)
    found = search(load_LE, start_LRS, target_L, rules, None)
    slots_LRS = _nearest(load_LE, start_LRS, target_L, rules, found)
    if max_moves is not None and received(start_LRS, slots_LRS) > max_moves:
        slots_LRS = _within(load_LE, start_LRS, target_L, rules, max_moves)
    return slots_LRS, best_fractions(load_LE, slots_LRS, speeds_R)


def _nearest(
    load_LE: LoadLE, slots_LRS: SlotsLRS, target_L: Floats, rules: Rules, found: Found
) -> SlotsLRS:
    """`found`; layers that missed their target instead as near to it as halving the distance again
    and again finds."""
    out_LRS = found.slots_LRS
    todo_T = np.flatnonzero(~found.reached_L)
    best_TRS, tried_TRS = slots_LRS[todo_T], out_LRS[todo_T]
    while len(todo_T):
        load_TE, floor_T = load_LE[todo_T], target_L[todo_T]
        before_T = level_T = _levels(load_TE, best_TRS, rules)
        start_TRS = best_TRS
        for _ in range(HALVINGS + 1):
            tried_T = _levels(load_TE, tried_TRS, rules)
            better_T = tried_T < level_T
            best_TRS = np.where(better_T[:, None, None], tried_TRS, best_TRS)
            level_T = np.minimum(level_T, tried_T)
            middle_T = (floor_T + level_T) / 2
            trial = search(load_TE, start_TRS, middle_T, rules, None)
            floor_T = np.where(trial.reached_L, floor_T, middle_T)
            tried_TRS = trial.slots_LRS
        worth_T = level_T < before_T * (1 - WORTHWHILE)
        best_TRS = np.where(worth_T[:, None, None], best_TRS, start_TRS)
        out_LRS[todo_T] = best_TRS
        todo_T, best_TRS = todo_T[worth_T], best_TRS[worth_T]
        if not len(todo_T):
            break
        again = search(load_LE[todo_T], best_TRS, target_L[todo_T], rules, None)
        tried_TRS = again.slots_LRS
    return out_LRS


def _within(
    load_LE: LoadLE, slots_LRS: SlotsLRS, target_L: Floats, rules: Rules, max_moves: int
) -> SlotsLRS:
    """The same with fewer moves: the fullest ranks of all layers first.

    All layers run one after another, so a token on the fullest rank of one layer costs as much as
    on that of another: what counts is how far above its target a layer is in tokens.
    """
    level_L = _levels(load_LE, slots_LRS, rules)
    above, left = float((level_L - target_L).max()), max_moves
    for step in range(1, STEPS + 1):
        above = above * STEP if step < STEPS else 0.0
        found = search(load_LE, slots_LRS, target_L + above, rules, left)
        moved_L = np.flatnonzero(found.moves_L)
        level_M = _levels(load_LE[moved_L], found.slots_LRS[moved_L], rules)
        better = level_M < level_L[moved_L] * (1 - WORTHWHILE)
        kept_L = moved_L[better]
        slots_LRS = slots_LRS.copy()
        slots_LRS[kept_L], level_L[kept_L] = found.slots_LRS[kept_L], level_M[better]
        left -= int(found.moves_L[kept_L].sum())
        if left <= 0:
            break
    return slots_LRS


def _levels(load_LE: LoadLE, slots_LRS: SlotsLRS, rules: Rules) -> Floats:
    """Largest load ÷ speed of each layer with the best split."""
    fractions_LRS = best_fractions(load_LE, slots_LRS, rules.speeds_R)
    loads_LR = rank_loads(slots_LRS, fractions_LRS, load_LE)
    return np.asarray((loads_LR / rules.speeds_R).max(axis=1))
