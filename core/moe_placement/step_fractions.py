"""Incremental plan with fractions: from the placement in force, as few moves as the goal takes.

First what must be is put right (`repair`). Then, in layers whose best split misses the goal, the
sets of ranks that no split relieves are opened one after another by a copy elsewhere, until the
goal, the budget or the end of what helps (`step_fractions_search`). A layer at its goal is left
alone, one that could not be improved keeps what it had. Neighbours: `full_fractions` (a plan from
nothing), `split` (fractions alone), `planner`.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement import repair
from moe_placement.bound import lower_bound
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.overflow import NOTHING
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions
from moe_placement.step_fractions_search import Rules, search

Floats = npt.NDArray[np.float64]

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

    No layer that was whole ends up with a fuller fullest rank than its best split had before.
    """
    width = max(current_LRS.shape[2], int(slots_R.max()))
    wide_LRS = np.full((*current_LRS.shape[:2], width), -1, dtype=np.int32)
    wide_LRS[:, :, : current_LRS.shape[2]] = current_LRS
    start_LRS = repair.whole(load_LE, wide_LRS, slots_R, speeds_R, copies)
    rules = Rules(slots_R, speeds_R, copies)
    bound_L = lower_bound(load_LE, slots_R, speeds_R, copies.max_copies)
    target_L = (1 + goal) * bound_L / (1 + NOTHING)
    slots_LRS, moves = search(load_LE, start_LRS, target_L, rules, None)
    if max_moves is not None and moves > max_moves:
        slots_LRS = _within(load_LE, start_LRS, target_L, rules, max_moves)
    return slots_LRS, best_fractions(load_LE, slots_LRS, speeds_R)


def _within(
    load_LE: LoadLE, slots_LRS: SlotsLRS, target_L: Floats, rules: Rules, max_moves: int
) -> SlotsLRS:
    """The same with fewer moves: the fullest ranks of all layers first.

    All layers run one after another, so a token on the fullest rank of one layer costs as much as
    on that of another: what counts is how far above its target a layer is in tokens.
    """
    fractions_LRS = best_fractions(load_LE, slots_LRS, rules.speeds_R)
    level_L = (rank_loads(slots_LRS, fractions_LRS, load_LE) / rules.speeds_R).max(axis=1)
    above = float((level_L - target_L).max())
    moves = 0
    for step in range(1, STEPS + 1):
        above = above * STEP if step < STEPS else 0.0
        next_LRS, made = search(load_LE, slots_LRS, target_L + above, rules, max_moves - moves)
        slots_LRS, moves = next_LRS, moves + made
        if moves >= max_moves:
            break
    return slots_LRS
