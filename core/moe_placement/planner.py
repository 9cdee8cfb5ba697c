"""The planner's recipe: a load, what ranks can take and what is in force → where experts go.

Cheapest first: solve the fractions again (no move), then a few moves within the budget, then a new
plan altogether, relabelled so that most of it already lies where it should. What could not be had
is said in `given_up`.

Neighbours: `full_fractions`, `full_even`, `split`, `relabel` and `membership` do the work; `decide`
asks whether a plan pays, `waves` walks there.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS, even_fractions
from moe_placement import full_even, full_fractions, repair, step_fractions
from moe_placement.bound import GapL, gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import (
    FRACTION_TOLERANCE,
    ExpertsL,
    Placement,
    copies,
    received,
)
from moe_placement.score import LoadLE, check_load, rank_loads
from moe_placement.split import best_fractions

WORTHWHILE_GAP = 1e-3
"""A layer is planned anew only if that brings its fullest rank this much nearer to the bound."""
ROUNDING = 1e-9
"""Shares of a rank's load that are no difference."""


class Split(StrEnum):
    """How an expert's tokens are divided among its copies."""

    FRACTIONS = "fractions"
    EVEN = "even"


class Level(StrEnum):
    """How far a plan goes beyond what is in force."""

    KEPT = "kept"
    FRACTIONS = "fractions"
    MOVES = "moves"
    FULL = "full"


@dataclass(frozen=True)
class Goal:
    """What is wanted of a plan, and what it may cost."""

    split: Split = Split.FRACTIONS
    copies: CopyLimits = field(default_factory=CopyLimits)
    max_moves: int | None = None
    """Experts that ranks may receive on the way, all layers together; None = no limit. What a lost
    or leaving rank makes necessary is done beyond it."""
    aim: float = 0.03
    """A layer is left alone when its fullest rank is no further than this above the bound."""


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
        there = current and _rest(current, rows, open_ranks)
        left = goal.max_moves if goal.max_moves is None else max(0, goal.max_moves - moves)
        part = _plan_alike(load_LE[rows, :num_experts], ranks, replace(goal, max_moves=left), there)
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


def _rest(
    placement: Placement, layers: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
) -> Placement:
    """What is left of a placement on some ranks: remaining copies serve all of their expert."""
    at = np.ix_(layers, ranks)
    slots_LRS, fractions_LRS = placement.slots_LRS[at], placement.fractions_LRS[at]
    index = np.nonzero(slots_LRS >= 0)
    key_N = index[0] * (int(slots_LRS.max(initial=0)) + 1) + slots_LRS[index]
    total_N = np.bincount(key_N, fractions_LRS[index])[key_N]
    even_N = even_fractions(slots_LRS)[index]
    lost_N = np.abs(total_N - 1) > FRACTION_TOLERANCE
    share_N = fractions_LRS[index] / np.where(lost_N & (total_N > 0), total_N, 1.0)
    out_LRS = np.zeros(slots_LRS.shape)
    out_LRS[index] = np.where(total_N > 0, share_N, even_N)
    return Placement(slots_LRS, out_LRS)


def _plan_alike(load_LE: LoadLE, ranks: Capacity, goal: Goal, current: Placement | None) -> Planned:
    """The same for layers with as many experts as each other and ranks that are all open."""
    width = 0 if current is None else current.slots_LRS.shape[2]
    full = functools.cache(lambda: _wide(_full(load_LE, ranks, goal), width))
    if current is None or not (current.slots_LRS >= 0).any():
        return _judged(load_LE, ranks, goal, current, full(), Level.FULL)
    there = _kept(load_LE, ranks, goal, current, _stepped(load_LE, ranks, goal, current))
    stepped = _judged(load_LE, ranks, goal, current, there, Level.MOVES)
    if goal.max_moves is not None or (stepped.gap_L <= goal.aim).all():
        return stepped
    # Moves alone did not get there, and more are allowed: a new plan for the layers it helps.
    slots_LRS = full().slots_LRS
    fresh = _judged(
        load_LE, ranks, goal, current, _shared(load_LE, ranks, goal, slots_LRS), Level.FULL
    )
    better_L = (stepped.gap_L > goal.aim) & (fresh.gap_L < stepped.gap_L - WORTHWHILE_GAP)
    if not better_L.any():
        return stepped
    mixed = Placement(
        np.where(better_L[:, None, None], fresh.placement.slots_LRS, there.slots_LRS),
        np.where(better_L[:, None, None], fresh.placement.fractions_LRS, there.fractions_LRS),
    )
    return _judged(load_LE, ranks, goal, current, mixed, Level.FULL)


def _full(load_LE: LoadLE, ranks: Capacity, goal: Goal) -> Placement:
    if goal.split is Split.EVEN:
        slots_LRS = full_even.plan(load_LE, ranks.slots_R, ranks.speeds_R, goal.copies)
        return Placement.even(slots_LRS)
    return Placement(*full_fractions.plan(load_LE, ranks.slots_R, ranks.speeds_R, goal.copies))


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
        return Placement.even(repair.whole(*arguments))
    return Placement(*step_fractions.improve(*arguments, goal.aim, goal.max_moves))


def _shared(load_LE: LoadLE, ranks: Capacity, goal: Goal, slots_LRS: SlotsLRS) -> Placement:
    """A placement with the fractions that suit it best."""
    if goal.split is Split.EVEN:
        return Placement.even(slots_LRS)
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
    keep_L = valid_L & (
        _peaks(load_LE, ranks, there) >= _peaks(load_LE, ranks, current) * (1 - ROUNDING)
    )
    return Placement(
        np.where(keep_L[:, None, None], current.slots_LRS, there.slots_LRS),
        np.where(keep_L[:, None, None], current.fractions_LRS, there.fractions_LRS),
    )


def _peaks(load_LE: LoadLE, ranks: Capacity, placement: Placement) -> npt.NDArray[np.float64]:
    """Largest load ÷ speed of each layer."""
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    return np.asarray((loads_LR / ranks.speeds_R).max(axis=1))


def _judged(
    load_LE: LoadLE,
    ranks: Capacity,
    goal: Goal,
    current: Placement | None,
    placement: Placement,
    level: Level,
) -> Planned:
    bound_L = lower_bound(load_LE, ranks.slots_R, ranks.speeds_R, goal.copies.max_copies)
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    gap_L = gap(loads_LR, ranks.speeds_R, bound_L)
    moves = int((placement.slots_LRS >= 0).sum())
    if current is not None:
        moves = received(current.slots_LRS, placement.slots_LRS)
        if np.array_equal(placement.slots_LRS, current.slots_LRS):
            same = np.array_equal(placement.fractions_LRS, current.fractions_LRS)
            level = Level.KEPT if same else Level.FRACTIONS
    return Planned(placement, level, moves, gap_L, tuple(_given_up(gap_L, goal, moves)))


def _given_up(gap_L: GapL, goal: Goal, moves: int) -> list[str]:
    over_L = np.flatnonzero(gap_L > goal.aim)
    if not len(over_L):
        return []
    worst = int(over_L[np.argmax(gap_L[over_L])])
    spent = goal.max_moves is not None and moves >= goal.max_moves
    why = f"the budget of {goal.max_moves} moves is spent" if spent else "no better plan was found"
    return [
        f"balance: {len(over_L)} layers stay more than {goal.aim:.1%} above the bound, worst "
        f"layer {worst} at {gap_L[worst]:.1%}: {why}"
    ]
