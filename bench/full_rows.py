"""Full plans measured: with fractions, with an even split, and with ranks of unequal speed.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bench import exact_pairs, greedy_hierarchical, placement_loads
from bench.figure import Choice, Tally, timed
from bench.placement_loads import LoadLE, Shape
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal, Split
from moe_placement.placement import Placement
from moe_placement.planner import plan

FRACTIONS, EVEN = Goal(split=Split.FRACTIONS), Goal(split=Split.EVEN)
SLOW_SPEED = 0.7
SKEWED = "zipf1.4"

LevelL = npt.NDArray[np.float64]


def capacity_of(shape: Shape) -> Capacity:
    return Capacity.of(shape.slots_per_rank, shape.ranks)


def checked(placement: Placement, load_LE: LoadLE) -> Placement:
    """The same placement, which the independent judge finds no fault with."""
    found = placement_loads.faults(placement.slots_LRS, load_LE.shape[1], placement.fractions_LRS)
    assert not found, found
    return placement


def gap_of(placement: Placement, load_LE: LoadLE) -> LevelL:
    return placement_loads.gap(placement.slots_LRS, load_LE, placement.fractions_LRS)


def published(shape: Shape, load_LE: LoadLE, *, groups: bool = False) -> npt.NDArray[np.int64]:
    """The published method's plan; global unless it is to keep expert groups on nodes."""
    nodes, num_groups = (shape.nodes, shape.expert_groups) if groups else (1, 1)
    return greedy_hierarchical.plan(load_LE, shape.slots, shape.ranks, nodes, num_groups)


def fractions(choice: Choice) -> Iterator[Tally]:
    """Gap and time of a full plan with fractions."""
    for key in choice.shapes:
        shape, tally = choice.shape(key), Tally("fractions", key)
        grouped = shape.expert_groups > 1 and shape.expert_groups % shape.nodes == 0
        for kind in choice.loads:
            load = choice.load(key, kind)
            planned, ms = timed(choice.repeats, plan, load, capacity_of(shape), FRACTIONS)
            slots, their_ms = timed(choice.repeats, published, shape, load)
            gap = gap_of(checked(planned.placement, load), load).max()
            their_gap = placement_loads.gap(slots, load).max()
            tally.add(kind, "gap, worst layer", "%", gap, their_gap, goal=1e-4, digits=3)
            if grouped:
                slots = published(shape, load, groups=True)
                their_gap = placement_loads.gap(slots, load).max()
                tally.add(kind, "  same, groups kept on nodes", "%", gap, their_gap)
            limit = {"a": None, "e": 500}.get(key, 50)
            tally.add(kind, "time, all layers", "ms", ms, their_ms, goal=limit, digits=0)
        yield tally


def even(choice: Choice) -> Iterator[Tally]:
    """Gap and time of a full plan with an even split; on Mixtral's shape against the optimum."""
    for key in choice.shapes:
        tally = Tally("even", key)
        for kind in choice.loads:
            _even(choice, key, kind, tally)
        yield tally


def _even(choice: Choice, key: str, kind: str, tally: Tally) -> None:
    shape, load = choice.shape(key), choice.load(key, kind)
    planned, ms = timed(choice.repeats, plan, load, capacity_of(shape), EVEN)
    slots, their_ms = timed(choice.repeats, published, shape, load)
    gap_L = gap_of(checked(planned.placement, load), load)
    their_L = placement_loads.gap(slots, load)
    which = " (zipf1.4)" if kind == SKEWED else ""
    promised = key in ("b", "c1", "c2", "c3", "d")
    mean_goal = 0.03 if kind == SKEWED else 0.005
    worst_goal = None if kind == SKEWED else 0.03
    for name, of_layers, goal in (
        (f"gap, mean of layers{which}", np.mean, mean_goal),
        (f"gap, worst layer{which}", np.max, worst_goal),
    ):
        theirs = of_layers(their_L)
        goal = goal if promised else None
        tally.add(kind, name, "%", of_layers(gap_L), theirs, goal=goal, digits=2)
    if key == "a":
        exact_L = exact_gaps(load, shape.ranks)
        tally.add(
            kind, "gap over exact optimum, worst layer", "%", (gap_L - exact_L).max(),
            (their_L - exact_L).max(), goal=0.005, digits=2,
        )  # fmt: skip
    limit = {"a": None, "e": 500}.get(key, 250)
    tally.add(kind, "time, all layers", "ms", ms, their_ms, goal=limit, digits=0)


def exact_gaps(load_LE: LoadLE, num_ranks: int) -> LevelL:
    """Gap of the best even split of each layer, where ranks have two slots."""
    exact_L = np.array([exact_pairs.best_even_level(load_E, num_ranks) for load_E in load_LE])
    bound_L = placement_loads.lower_bound(load_LE, 2 * num_ranks, num_ranks)
    return placement_loads.over(exact_L, bound_L)


def speeds(choice: Choice) -> Iterator[Tally]:
    """A quarter of the ranks is slow: largest load ÷ speed over the ideal."""
    for key in choice.shapes:
        shape, tally = choice.shape(key), Tally("speeds", key)
        speeds_R = np.where(np.arange(shape.ranks) % 4 == 0, SLOW_SPEED, 1.0)
        capacity = Capacity.of(shape.slots_per_rank, shape.ranks, speeds=speeds_R)
        for kind in choice.loads:
            load = choice.load(key, kind)
            placement = checked(plan(load, capacity, FRACTIONS).placement, load)
            # No plan beats the ideal of these speeds, nor what holds when no rank is slow.
            bound_L = np.maximum(
                placement_loads.lower_bound(load, shape.slots, shape.ranks, speeds_R),
                placement_loads.lower_bound(load, shape.slots, shape.ranks),
            )
            ours_LR = placement_loads.rank_load(placement.slots_LRS, load, placement.fractions_LRS)
            theirs_LR = placement_loads.rank_load(published(shape, load), load)
            ours, theirs = (
                placement_loads.over((loads_LR / speeds_R).max(axis=1), bound_L).max()
                for loads_LR in (ours_LR, theirs_LR)
            )
            name = "gap, worst layer, ¼ of ranks at 0.7"
            tally.add(kind, name, "%", ours, theirs, goal=1e-3, digits=3)
        yield tally
