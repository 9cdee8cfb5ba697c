"""Planned: a plan with what it promises, what it takes, and what could not be had.

Neighbours: `recipe` makes plans and has them judged here, `explain` tells more of one.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moe_placement.bound import GapL, gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal
from moe_placement.placement import Placement, received
from moe_placement.score import LoadLE, rank_loads
from moe_placement.topology.spread import UnderSpread, under_spread


class Level(StrEnum):
    """How far a plan goes beyond what is in force."""

    KEPT = "kept"
    FRACTIONS = "fractions"
    MOVES = "moves"
    FULL = "full"


@dataclass(frozen=True, eq=False)
class Planned:
    placement: Placement
    level: Level
    moves: int
    """Experts that some rank has to receive."""
    gap_L: GapL
    """Fullest rank over the bound that no placement beats, minus 1; 0 without load."""
    given_up: tuple[str, ...]
    """What was wanted and could not be had, in words; at most a few lines."""


def judged(
    load_LE: LoadLE,
    ranks: Capacity,
    goal: Goal,
    current: Placement | None,
    placement: Placement,
    level: Level,
) -> Planned:
    """A placement on open ranks, measured; `level` as far as anything differs from `current`."""
    bound_L = lower_bound(load_LE, ranks.slots_R, ranks.speeds_R, goal.copies.max_copies)
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    gap_L = gap(loads_LR, ranks.speeds_R, bound_L)
    moves = int((placement.slots_LRS >= 0).sum())
    if current is not None:
        moves = received(current.slots_LRS, placement.slots_LRS)
        if np.array_equal(placement.slots_LRS, current.slots_LRS):
            same = np.array_equal(placement.fractions_LRS, current.fractions_LRS)
            level = Level.KEPT if same else Level.FRACTIONS
    spent = goal.max_moves is not None and moves >= goal.max_moves
    why = f"the budget of {goal.max_moves} moves is spent" if spent else "no better plan was found"
    short = under_spread(placement.slots_LRS, ranks.domains_R, goal.spread_domains)
    given_up = [f"{lack}: {why}" for lack in (*_unlevel(gap_L, goal), *_together(short, goal))]
    return Planned(placement, level, moves, gap_L, tuple(given_up))


def _unlevel(gap_L: GapL, goal: Goal) -> list[str]:
    over_L = np.flatnonzero(gap_L > goal.aim)
    if not len(over_L):
        return []
    worst = int(over_L[np.argmax(gap_L[over_L])])
    return [
        f"balance: {len(over_L)} layers stay more than {goal.aim:.1%} above the bound, worst "
        f"layer {worst} at {gap_L[worst]:.1%}"
    ]


def _together(short: list[UnderSpread], goal: Goal) -> list[str]:
    if not short:
        return []
    first = short[0]
    return [
        f"spread: {len(short)} experts stay in fewer than {goal.spread_domains} domains, first "
        f"layer {first.layer}, expert {first.expert} in {first.domains}"
    ]
