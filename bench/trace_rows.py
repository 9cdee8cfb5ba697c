"""A recorded trace replayed: four domains in turn, each window planned from earlier ones only.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench import greedy_hierarchical, placement_loads, recorded_loads
from bench.change_rows import alone
from bench.figure import Choice, Tally
from bench.full_rows import EVEN, FRACTIONS, checked, gap_of
from bench.placement_loads import LoadLE
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal, Split
from moe_placement.placement import Placement
from moe_placement.planner import plan
from moe_placement.split import best_fractions

NUM_EXPERTS, NUM_SLOTS, NUM_RANKS = 64, 80, 16
CASES = ((1024, 1.0), (512, 0.3), (2048, 0.7))
"""(tokens a window, weight of the newest window in the forecast); the goals are the first's."""

GOALS = {"fractions": replace(FRACTIONS, aim=0.05), "even": replace(EVEN, aim=0.05)}
Planner = Callable[[LoadLE, Placement | None], Placement]


@dataclass(frozen=True)
class Replayed:
    """Means over the windows after the first."""

    gap: float
    """With the fractions planned for the forecast, over layers."""
    gap_solved: float
    """With the best fractions for each window, on the same placement."""
    moves: float
    """Of all slots, a window."""


def trace(choice: Choice) -> Iterator[Tally]:
    """Realised gap of the next window, and what is moved for it."""
    for width, newest in CASES[: 1 if choice.max_layers else None]:
        windows = recorded_loads.trace(width, NUM_EXPERTS)
        tally = Tally("trace", f"W={width}")
        theirs = replayed(windows, newest, published)
        promised = (width, newest) == CASES[0]
        for name, goal in GOALS.items():
            mine = replayed(windows, newest, ours(goal))
            tally.add(
                name, f"gap of the next window, {name}", "%", mine.gap, theirs.gap,
                goal=theirs.gap if promised else None,
            )  # fmt: skip
            tally.add(
                name, f"  moves a window, of slots, {name}", "%", mine.moves, theirs.moves,
                goal=0.1 * theirs.moves if promised else None,
            )  # fmt: skip
            if goal.split is Split.FRACTIONS:
                tally.add(
                    name, "  gap with fractions solved again", "%", mine.gap_solved,
                    theirs.gap_solved, goal=0.15 if promised else None,
                )  # fmt: skip
        yield tally


def replayed(windows: Sequence[LoadLE], newest: float, planner: Planner) -> Replayed:
    """Plan for a forecast of the windows so far, and score by the next one."""
    forecast_LE, placement = windows[0], planner(windows[0], None)
    gaps, solved, moves = [], [], []
    for load_LE in windows[1:]:
        gaps.append(gap_of(placement, load_LE).mean())
        again_LRS = best_fractions(load_LE, placement.slots_LRS, np.ones(NUM_RANKS))
        solved.append(gap_of(Placement(placement.slots_LRS, again_LRS), load_LE).mean())
        forecast_LE = (1 - newest) * forecast_LE + newest * load_LE
        before, placement = placement, planner(forecast_LE, placement)
        received = placement_loads.weights_received(before.slots_LRS, placement.slots_LRS)
        moves.append(received / (NUM_SLOTS * len(load_LE)))
    return Replayed(float(np.mean(gaps)), float(np.mean(solved)), float(np.mean(moves)))


def ours(goal: Goal) -> Planner:
    capacity = Capacity.of(NUM_SLOTS // NUM_RANKS, NUM_RANKS)

    def planned(load_LE: LoadLE, current: Placement | None) -> Placement:
        return checked(plan(load_LE, capacity, goal, current).placement, load_LE)

    return planned


def published(load_LE: LoadLE, current: Placement | None) -> Placement:
    return Placement.even(alone(greedy_hierarchical.plan(load_LE, NUM_SLOTS, NUM_RANKS)))
