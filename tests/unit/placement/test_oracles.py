"""The planner against answers found by other means: linear programs and enumeration.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench import greedy_hierarchical, placement_loads
from moe_placement.bound import lower_bound
from moe_placement.capacity import Capacity
from moe_placement.even.full_even import AIM
from moe_placement.goal import Goal, Split
from moe_placement.planner import plan
from moe_placement.score import rank_loads
from moe_placement.split import best_fractions
from tests.support.planning_problems import Problem, loads, problems
from tests.support.split_oracle import (
    best_level,
    enumerated_even_level,
    enumerated_level,
    placements,
    placements_even,
)

LP_TOLERANCE = 1e-6


@settings(deadline=None, max_examples=60)
@given(problems(present=True, ragged=False))
def test_split_of_any_placement_is_as_good_as_the_linear_program(problem: Problem) -> None:
    assert problem.current is not None
    slots, speeds = problem.current.slots_LRS, problem.capacity.speeds_R
    fractions = best_fractions(problem.load_LE, slots, speeds)
    assert placement_loads.faults(slots, problem.load_LE.shape[1], fractions) == []
    level_L = (rank_loads(slots, fractions, problem.load_LE) / speeds).max(axis=1)
    for layer, load_E in enumerate(problem.load_LE):
        if load_E.sum() > 0:
            best = best_level(load_E, slots[layer], speeds)
            assert level_L[layer] <= best * (1 + LP_TOLERANCE)
            assert level_L[layer] >= best * (1 - LP_TOLERANCE), "better than the optimum"


@settings(deadline=None, max_examples=15)
@given(st.integers(3, 40), st.integers(0, 2**32 - 1))
def test_split_carries_load_along_a_whole_chain_of_ranks(num_ranks: int, seed: int) -> None:
    """Rank r holds experts r and r + 1: what the first has too much must pass through all."""
    slots = np.stack([np.arange(num_ranks), np.arange(1, num_ranks + 1)], axis=1)[None]
    slots = slots.astype(np.int32)
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 1, (1, num_ranks + 1)) * np.linspace(num_ranks, 0.1, num_ranks + 1)
    speeds = rng.choice([1.0, 0.7], num_ranks)
    level = (rank_loads(slots, best_fractions(load, slots, speeds), load) / speeds).max()
    assert level <= best_level(load[0], slots[0], speeds) * (1 + LP_TOLERANCE)


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize("shape_key", ["a", "b", "c1"])
def test_split_of_a_greedy_placement_is_as_good_as_the_linear_program(
    shape_key: str, kind: str
) -> None:
    shape = placement_loads.SHAPES[shape_key]
    load = placement_loads.make_load(shape_key, kind, salt=11)[:2]
    slots = greedy_hierarchical.plan(load, shape.slots, shape.ranks)
    slots = without_second_copies(slots)
    speeds = np.where(np.arange(shape.ranks) % 4 == 0, 0.7, 1.0)
    fractions = best_fractions(load, slots, speeds)
    level_L = (rank_loads(slots, fractions, load) / speeds).max(axis=1)
    for layer in range(len(load)):
        best = best_level(load[layer], slots[layer], speeds)
        assert level_L[layer] <= best * (1 + LP_TOLERANCE)


MAX_PLACEMENTS = 2**16
ENUMERATED = {
    Split.FRACTIONS: (placements, enumerated_level),
    Split.EVEN: (placements_even, enumerated_even_level),
}


@st.composite
def few_experts(draw: st.DrawFn, *, alike: bool) -> tuple[np.ndarray, Capacity]:
    """Layers of at most five experts whose placements can all be listed."""
    num_experts, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    least = -(-num_experts // num_ranks)
    slots = [draw(st.integers(least, 3))] * num_ranks if least <= 3 else [least] * num_ranks
    speeds = [1.0] * num_ranks
    if not alike:
        slots = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks))
        speed = st.sampled_from([0.5, 0.7, 1.0, 2.0])
        speeds = draw(st.lists(speed, min_size=num_ranks, max_size=num_ranks))
    assume(sum(slots) >= num_experts)
    assume(2 ** (num_experts * num_ranks) <= MAX_PLACEMENTS)
    return draw(loads(2, num_experts)), Capacity.of(slots, speeds=speeds)


@pytest.mark.parametrize("split", list(Split))
@settings(deadline=None, max_examples=60)
@given(few_experts(alike=False))
def test_no_placement_at_all_beats_the_bound(
    split: Split, case: tuple[np.ndarray, Capacity]
) -> None:
    load_LE, capacity = case
    listed, level_of = ENUMERATED[split]
    every = listed(load_LE.shape[1], capacity.slots_R.tolist())
    bound_L = lower_bound(load_LE, capacity.slots_R, capacity.speeds_R)
    for load_E, bound in zip(load_LE, bound_L, strict=True):
        assert bound <= level_of(load_E, every, capacity.speeds_R) * (1 + 1e-9)


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("alike", [True, False])
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_plan_of_few_experts_is_the_best_there_is(
    split: Split, alike: bool, data: st.DataObject
) -> None:
    """Also where ranks have different slots and speeds, and where the theorem promises nothing."""
    load_LE, capacity = data.draw(few_experts(alike=alike))
    listed, level_of = ENUMERATED[split]
    every = listed(load_LE.shape[1], capacity.slots_R.tolist())
    placement = plan(load_LE, capacity, Goal(split=split)).placement
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    # So near to the bound the search for an even split ends.
    tolerance = LP_TOLERANCE if split is Split.FRACTIONS else AIM
    for load_E, level in zip(load_LE, (loads_LR / capacity.speeds_R).max(axis=1), strict=True):
        assert level <= level_of(load_E, every, capacity.speeds_R) * (1 + tolerance)


def without_second_copies(slots_LRS: np.ndarray) -> np.ndarray:
    """The greedy method may give a rank an expert twice; the second slot counts as free here."""
    ordered = np.sort(slots_LRS, axis=2)
    ordered[:, :, 1:][ordered[:, :, 1:] == ordered[:, :, :-1]] = -1
    return ordered.astype(np.int32)
