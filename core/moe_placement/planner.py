"""The planner: a load, what ranks can take and what is in force → where experts go.

Cheapest first: solve the fractions again (no move), then a few moves within the budget, then a new
plan altogether, relabelled so that most of it already lies where it should. Neighbours: `recipe`
plans what this brings to a simple form, `goal` and `planned` are what goes in and comes out,
`decide` asks whether a plan pays, `waves` walks there.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moe_placement.capacity import Capacity
from moe_placement.goal import Goal
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import ExpertsL, Placement, remaining
from moe_placement.planned import Level, Planned
from moe_placement.recipe import plan_alike
from moe_placement.score import LoadLE, check_load


def plan(
    load_LE: npt.NDArray[np.generic],
    capacity: Capacity,
    goal: Goal | None = None,
    current: Placement | None = None,
    experts_L: ExpertsL | None = None,
) -> Planned:
    """Where experts should be, from nothing or from what is in force.

    Args:
        load_LE: tokens per logical expert in a window; a layer without tokens keeps what it has.
        current: in force; may name ranks that are dead or draining. None = nothing is placed yet.
        experts_L: number of experts of each layer; None = all columns. Load beyond is ignored.

    A target names open ranks only, at most their serving slots. Who stays keeps its slot. With
    nothing lost or leaving, no layer's fullest rank is busier than under `current`.

    Raises:
        ValueError: a load that is no token count, or shapes that do not agree.
        CopyLimitsError, InsufficientSlots: the open ranks cannot hold the copies asked for.
    """
    goal = goal or Goal()
    load_LE = check_load(load_LE)
    if experts_L is None:
        experts_L = np.full(len(load_LE), load_LE.shape[1])
    _check(load_LE, experts_L, capacity, current)
    ranks, open_ranks = capacity.only(capacity.open_R), np.flatnonzero(capacity.open_R)
    width = max(int(capacity.slots_R.max()), 0 if current is None else current.slots_LRS.shape[2])
    slots_LRS = np.full((len(load_LE), capacity.num_ranks, width), -1, dtype=np.int32)
    fractions_LRS = np.zeros(slots_LRS.shape)
    gap_L, moves, level = np.zeros(len(load_LE)), 0, Level.KEPT
    given_up: list[str] = []
    # Layers with as many experts as each other are planned in one go.
    for num_experts in np.unique(experts_L).tolist():
        rows = np.flatnonzero(experts_L == num_experts)
        there = None
        if current is not None:
            at = np.ix_(rows, open_ranks)
            there = remaining(current.slots_LRS[at], current.fractions_LRS[at])
        left = goal.max_moves if goal.max_moves is None else max(0, goal.max_moves - moves)
        part = plan_alike(load_LE[rows, :num_experts], ranks, replace(goal, max_moves=left), there)
        at = np.ix_(rows, open_ranks, np.arange(part.placement.slots_LRS.shape[2]))
        slots_LRS[at] = part.placement.slots_LRS
        fractions_LRS[at] = part.placement.fractions_LRS
        gap_L[rows] = part.gap_L
        moves += part.moves
        level = max(level, part.level, key=list(Level).index)
        given_up += part.given_up
    return Planned(Placement(slots_LRS, fractions_LRS), level, moves, gap_L, tuple(given_up))


def _check(
    load_LE: LoadLE, experts_L: ExpertsL, capacity: Capacity, current: Placement | None
) -> None:
    if len(experts_L) != len(load_LE) or (experts_L > load_LE.shape[1]).any():
        raise ValueError(
            f"{len(experts_L)} layers have up to {int(experts_L.max())} experts, "
            f"the load has shape {load_LE.shape}"
        )
    if current is not None and current.slots_LRS.shape[:2] != (len(load_LE), capacity.num_ranks):
        raise ValueError(
            f"the placement in force has shape {current.slots_LRS.shape}, the load has "
            f"{len(load_LE)} layers and there are {capacity.num_ranks} ranks"
        )
    most = int(experts_L.max())
    if capacity.room < most:
        uncovered = [
            (layer, expert)
            for layer in range(len(experts_L))
            for expert in range(capacity.room, int(experts_L[layer]))
        ]
        raise InsufficientSlots(
            f"{int(capacity.open_R.sum())} ranks with {capacity.room} serving slots in all cannot "
            f"hold {most} experts: add slots or ranks",
            uncovered,
        )
