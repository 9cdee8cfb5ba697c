"""The recipe for layers that are alike: a few moves within the budget, or a new plan.

All ranks are open, all layers have as many experts. Neighbours: `planner` brings every problem to
this form, `step_fractions`, `step_even`, `full_fractions`, `full_even`, `localise` plan, `relabel`
and `spread` change a plan without changing its balance.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import Capacity
from moe_placement.even import full_even, step_even
from moe_placement.full import full_fractions
from moe_placement.goal import Goal, Split
from moe_placement.placement import Placement, copies, received
from moe_placement.planned import Level, Planned, judged
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions
from moe_placement.step import step_fractions
from moe_placement.step.relabel import relabel
from moe_placement.topology import localise
from moe_placement.topology.crossing import least_crossing
from moe_placement.topology.dispatch import source_loads
from moe_placement.topology.spread import spread, under_spread
from moe_placement.topology.topology import interleaved

WORTHWHILE_GAP = 1e-3
"""A layer is planned anew only if that brings its fullest rank this much nearer to the bound."""
NO_DIFFERENCE = 1e-4
"""Share of the fullest rank's load for which nothing in force is changed."""


def plan_alike(load_LE: LoadLE, ranks: Capacity, goal: Goal, current: Placement | None) -> Planned:
    """A plan, judged. `current`: what is left in force on these ranks; None or empty = nothing."""
    width = int(ranks.slots_R.max())
    if current is not None:
        current = _wide(current, width)
        width = current.slots_LRS.shape[2]
    full = functools.cache(lambda: _wide(_full(load_LE, ranks, goal), width))
    if current is None or not (current.slots_LRS >= 0).any():
        return judged(load_LE, ranks, goal, current, full(), Level.FULL)
    there = _kept(load_LE, ranks, goal, current, _stepped(load_LE, ranks, goal, current))
    stepped = judged(load_LE, ranks, goal, current, there, Level.MOVES)
    if goal.max_moves is not None or (stepped.gap_L <= goal.aim).all():
        return stepped
    # Moves alone did not get there, and more are allowed: a new plan for the layers it helps.
    moved = relabel(
        full(),
        current.slots_LRS,
        ranks.speeds_R,
        ranks.slots_R,
        ranks.domains_R,
        within_domains=goal.near,
    )
    fresh = judged(load_LE, ranks, goal, current, moved, Level.FULL)
    better_L = (stepped.gap_L > goal.aim) & (fresh.gap_L < stepped.gap_L - WORTHWHILE_GAP)
    if not better_L.any():
        return stepped
    mixed = Placement(
        np.where(better_L[:, None, None], fresh.placement.slots_LRS, there.slots_LRS),
        np.where(better_L[:, None, None], fresh.placement.fractions_LRS, there.fractions_LRS),
    )
    return judged(load_LE, ranks, goal, current, mixed, Level.FULL)


def _full(load_LE: LoadLE, ranks: Capacity, goal: Goal) -> Placement:
    if goal.near and goal.split is Split.FRACTIONS:
        slots_LRS, fractions_LRS = localise.plan(
            load_LE,
            ranks.slots_R,
            ranks.speeds_R,
            ranks.domains_R,
            goal.copies,
            num_groups=goal.num_groups,
        )
        return _spread(load_LE, ranks, goal, Placement(slots_LRS, fractions_LRS))
    # Copies lie on neighbouring ranks: in another order they are in other domains at no cost.
    order_R = np.arange(ranks.num_ranks)
    if goal.spread_domains > 1:
        order_R = interleaved(ranks.domains_R)
    arguments = (load_LE, ranks.slots_R[order_R], ranks.speeds_R[order_R], goal.copies)
    if goal.split is Split.EVEN:
        placement = Placement.even(full_even.plan(*arguments))
    else:
        placement = Placement(*full_fractions.plan(*arguments))
    back_R = np.argsort(order_R)
    back = Placement(placement.slots_LRS[:, back_R], placement.fractions_LRS[:, back_R])
    return _spread(load_LE, ranks, goal, back)


def _spread(load_LE: LoadLE, ranks: Capacity, goal: Goal, placement: Placement) -> Placement:
    """With copies in as many domains as wanted, and the best split of where they are then."""
    if goal.spread_domains < 2:
        return placement
    slots_LRS, _ = spread(
        placement.slots_LRS,
        placement.fractions_LRS,
        load_LE,
        ranks.slots_R,
        ranks.speeds_R,
        ranks.domains_R,
        goal.spread_domains,
    )
    if np.array_equal(slots_LRS, placement.slots_LRS):
        return placement
    return _shared(load_LE, ranks, goal, slots_LRS)


def _wide(placement: Placement, width: int) -> Placement:
    """With as many slots a rank as what is in force has, the spare ones free."""
    more = ((0, 0), (0, 0), (0, max(0, width - placement.slots_LRS.shape[2])))
    return Placement(
        np.pad(placement.slots_LRS, more, constant_values=-1),
        np.pad(placement.fractions_LRS, more),
    )


def _stepped(load_LE: LoadLE, ranks: Capacity, goal: Goal, current: Placement) -> Placement:
    arguments = (load_LE, current.slots_LRS, ranks.slots_R, ranks.speeds_R, goal.copies)
    if goal.split is Split.EVEN:
        balanced = Placement.even(step_even.improve(*arguments, goal.aim, goal.max_moves))
    else:
        balanced = Placement(*step_fractions.improve(*arguments, goal.aim, goal.max_moves))
    apart = _spread(load_LE, ranks, goal, balanced)
    if goal.max_moves is None or received(current.slots_LRS, apart.slots_LRS) <= goal.max_moves:
        return apart
    return balanced


def _shared(load_LE: LoadLE, ranks: Capacity, goal: Goal, slots_LRS: SlotsLRS) -> Placement:
    """A placement with the fractions that suit it best."""
    if goal.split is Split.EVEN:
        return Placement.even(slots_LRS)
    if goal.near:
        sources_LED = source_loads(load_LE, ranks.domains_R)
        return Placement(
            slots_LRS, least_crossing(sources_LED, slots_LRS, ranks.speeds_R, ranks.domains_R)
        )
    return Placement(slots_LRS, best_fractions(load_LE, slots_LRS, ranks.speeds_R))


def _kept(
    load_LE: LoadLE, ranks: Capacity, goal: Goal, current: Placement, there: Placement
) -> Placement:
    """`there`, but what is in force where that is valid and the change brings nothing."""
    limits = goal.copies.within_reach(load_LE.shape[1], ranks.slots_R)
    copies_LE = copies(current.slots_LRS, load_LE.shape[1])
    most = limits.most(ranks.num_ranks)
    valid_L = ((copies_LE >= limits.min_copies) & (copies_LE <= most)).all(axis=1)
    valid_L &= ((current.slots_LRS >= 0).sum(axis=2) <= ranks.slots_R).all(axis=1)
    for short in under_spread(current.slots_LRS, ranks.domains_R, goal.spread_domains):
        valid_L[short.layer] = False
    keep_L = valid_L & (
        _peaks(load_LE, ranks, there) >= _peaks(load_LE, ranks, current) * (1 - NO_DIFFERENCE)
    )
    return Placement(
        np.where(keep_L[:, None, None], current.slots_LRS, there.slots_LRS),
        np.where(keep_L[:, None, None], current.fractions_LRS, there.fractions_LRS),
    )


def _peaks(load_LE: LoadLE, ranks: Capacity, placement: Placement) -> npt.NDArray[np.float64]:
    """Largest load ÷ speed of each layer."""
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    return np.asarray((loads_LR / ranks.speeds_R).max(axis=1))
