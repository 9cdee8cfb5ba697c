"""What the planner promises of every plan, and the walk of every instant, for anything asked of it.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement_loads
from moe_placement.capacity import Capacity, CapacityError
from moe_placement.copy_limits import CopyLimits
from moe_placement.goal import Goal, Split
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import Placement, copies, faults, received
from moe_placement.planner import plan
from moe_placement.score import rank_loads
from moe_placement.walk import waves
from moe_placement.walk.migration import reached
from tests.support.planning_problems import Problem, problems

ROUNDING = 1e-9
SPARE_SLOTS = 1


@st.composite
def asked(
    draw: st.DrawFn, *, present: bool | None = None, stays: bool = False
) -> tuple[Problem, Goal]:
    """A problem and what is wanted of its plan; the ranks can hold the copies asked for.

    stays: the plan in force is legal for what is asked and within the ranks that stay.
    """
    problem = draw(problems(present=present, stays=stays))
    goal = Goal(
        split=draw(st.sampled_from(Split)),
        copies=CopyLimits(
            min_copies=draw(st.sampled_from([1, 1, 1, 2])),
            max_copies=draw(st.sampled_from([None, None, 2, 3])),
        ),
        max_moves=draw(st.sampled_from([None, None, 0, 1, 3])),
        aim=draw(st.sampled_from([0.0, 0.03, 0.2])),
    )
    room_R = problem.capacity.slots_R[problem.capacity.open_R]
    fits = [goal.copies.within_reach(n, room_R) == goal.copies for n in problem.experts_L.tolist()]
    if not all(fits) or (stays and not within_limits(problem, goal)):
        goal = replace(goal, copies=CopyLimits())
    return problem, goal


def levels(placement: Placement, problem: Problem) -> npt.NDArray[np.float64]:
    """Largest load ÷ speed of each layer, closed ranks included, [L]."""
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, problem.load_LE)
    return np.asarray((loads_LR / problem.capacity.speeds_R).max(axis=1))


def nothing_leaves(problem: Problem) -> bool:
    """The plan in force is whole and within the ranks that stay."""
    assert problem.current is not None
    return not list(faults(problem.current, problem.experts_L, problem.capacity))


def within_limits(problem: Problem, goal: Goal) -> bool:
    """No expert of the plan in force has too few or too many copies."""
    assert problem.current is not None
    count_LE = copies(problem.current.slots_LRS, problem.load_LE.shape[1])
    exists = np.arange(count_LE.shape[1]) < problem.experts_L[:, None]
    most = goal.copies.most(int(problem.capacity.open_R.sum()))
    return bool(((count_LE >= goal.copies.min_copies) & (count_LE <= most))[exists].all())


@settings(deadline=None, max_examples=100)
@given(asked())
def test_every_plan_is_valid(case: tuple[Problem, Goal]) -> None:
    """Every expert on an open rank, never twice on one, no rank over its slots, shares sum to 1."""
    problem, goal = case
    planned = plan(problem.load_LE, problem.capacity, goal, problem.current, problem.experts_L)
    placement = planned.placement
    assert list(faults(placement, problem.experts_L, problem.capacity)) == []
    for layer, num_experts in enumerate(problem.experts_L.tolist()):
        rows = slice(layer, layer + 1)
        found = placement_loads.faults(
            placement.slots_LRS[rows], num_experts, placement.fractions_LRS[rows]
        )
        assert found == []
    assert placement.slots_LRS.dtype == np.int32
    served = rank_loads(placement.slots_LRS, placement.fractions_LRS, problem.load_LE).sum(axis=1)
    exists = np.arange(problem.load_LE.shape[1]) < problem.experts_L[:, None]
    assert np.allclose(served, np.where(exists, problem.load_LE, 0).sum(axis=1))
    if goal.split is Split.EVEN:
        even = Placement.even(placement.slots_LRS)
        assert np.allclose(placement.fractions_LRS, even.fractions_LRS)


@settings(deadline=None, max_examples=50)
@given(asked())
def test_no_expert_has_fewer_or_more_copies_than_allowed(case: tuple[Problem, Goal]) -> None:
    problem, goal = case
    planned = plan(problem.load_LE, problem.capacity, goal, problem.current, problem.experts_L)
    count_LE = copies(planned.placement.slots_LRS, problem.load_LE.shape[1])
    num_open = int(problem.capacity.open_R.sum())
    for layer, num_experts in enumerate(problem.experts_L.tolist()):
        count_E = count_LE[layer, :num_experts]
        if problem.current is None or goal.max_moves is None:
            assert count_E.min() >= goal.copies.min_copies
            assert count_E.max() <= goal.copies.most(num_open)


@settings(deadline=None, max_examples=70)
@given(asked(present=True, stays=True))
def test_a_plan_is_never_worse_than_the_one_in_force(case: tuple[Problem, Goal]) -> None:
    problem, goal = case
    assert problem.current is not None
    current = problem.current
    assert nothing_leaves(problem)
    planned = plan(problem.load_LE, problem.capacity, goal, current, problem.experts_L)
    before_L, after_L = levels(current, problem), levels(planned.placement, problem)
    assert (after_L <= before_L * (1 + ROUNDING) + ROUNDING).all()
    if goal.max_moves is not None:
        assert received(current.slots_LRS, planned.placement.slots_LRS) <= goal.max_moves


@settings(deadline=None, max_examples=50)
@given(asked())
def test_unchanged_load_moves_nothing(case: tuple[Problem, Goal]) -> None:
    """A plan is the planner's own answer to itself, unless the budget cut it short."""
    problem, goal = case
    goal = replace(goal, max_moves=None)
    args = (problem.load_LE, problem.capacity, goal)
    first = plan(*args, problem.current, problem.experts_L).placement
    again = plan(*args, first, problem.experts_L).placement
    assert np.array_equal(again.slots_LRS, first.slots_LRS)
    assert np.allclose(again.fractions_LRS, first.fractions_LRS)


@settings(deadline=None, max_examples=40)
@given(asked())
def test_same_input_same_plan_and_the_input_is_left_alone(case: tuple[Problem, Goal]) -> None:
    problem, goal = case
    load = problem.load_LE.copy()
    before = None
    if problem.current is not None:
        before = Placement(problem.current.slots_LRS.copy(), problem.current.fractions_LRS.copy())
    args = (problem.load_LE, problem.capacity, goal, problem.current, problem.experts_L)
    first, second = plan(*args).placement, plan(*args).placement
    assert np.array_equal(first.slots_LRS, second.slots_LRS)
    assert np.array_equal(first.fractions_LRS, second.fractions_LRS)
    assert np.array_equal(load, problem.load_LE)
    if before is not None and problem.current is not None:
        assert np.array_equal(before.slots_LRS, problem.current.slots_LRS)
        assert np.array_equal(before.fractions_LRS, problem.current.fractions_LRS)


@settings(deadline=None, max_examples=40)
@given(asked(), st.integers(0, 2))
def test_an_idle_layer_keeps_what_it_has_and_disturbs_no_other(
    case: tuple[Problem, Goal], layer: int
) -> None:
    """Zero load is not "no placement": it is whole, split evenly or as before, and never NaN."""
    problem, goal = case
    goal = replace(goal, max_moves=None)
    layer %= len(problem.load_LE)
    load = problem.load_LE.copy()
    load[layer] = 0
    args = (problem.capacity, goal, problem.current, problem.experts_L)
    idle, busy = plan(load, *args).placement, plan(problem.load_LE, *args).placement
    others = np.arange(len(load)) != layer
    assert np.array_equal(idle.slots_LRS[others], busy.slots_LRS[others])
    assert list(faults(idle, problem.experts_L, problem.capacity)) == []
    present = problem.current is not None and nothing_leaves(problem)
    if present and within_limits(problem, goal):
        assert problem.current is not None
        kept = problem.current.slots_LRS[layer]
        width = kept.shape[1]
        assert np.array_equal(idle.slots_LRS[layer][:, :width], kept)


@settings(deadline=None, max_examples=80)
@given(asked(present=True), st.data())
def test_no_instant_of_a_walk_is_without_an_expert(
    case: tuple[Problem, Goal], data: st.DataObject
) -> None:
    """From any plan in force, with lost and leaving ranks, within any limits: at every instant
    each expert that is held has a finished copy on a live rank, and the walk ends at the target.
    """
    problem, goal = case
    assert problem.current is not None
    capacity = problem.capacity
    planned = plan(problem.load_LE, capacity, goal, problem.current, problem.experts_L)
    target = planned.placement.slots_LRS
    limits = waves.Limits.within(
        capacity, SPARE_SLOTS, max_moves=data.draw(st.sampled_from([None, 1, 3]))
    )
    start = problem.current.slots_LRS
    steps = waves.walk(start, target, limits)
    here = start
    for wave in steps:
        walk_one_wave(here, wave, problem, limits)
        here = wave
    live = here.copy()
    live[:, ~capacity.live_R] = -1
    assert reached(live, target)


def walk_one_wave(
    before: npt.NDArray[np.int32],
    after: npt.NDArray[np.int32],
    problem: Problem,
    limits: waves.Limits,
) -> None:
    """Before the switch `before` serves, on the ranks that live; after it, `after`."""
    capacity = problem.capacity
    width = max(before.shape[2], after.shape[2])
    before = np.pad(before, ((0, 0), (0, 0), (0, width - before.shape[2])), constant_values=-1)
    after = np.pad(after, ((0, 0), (0, 0), (0, width - after.shape[2])), constant_values=-1)
    before = before.copy()
    before[:, ~capacity.live_R] = -1
    assert (after[:, ~capacity.live_R] == -1).all(), "a dead rank is named"
    assert ((after >= 0).sum(axis=2) <= capacity.slots_R + SPARE_SLOTS).all()
    arrives = (after >= 0) & (after != before)
    assert (before[arrives] == -1).all(), "an arrival in a slot that is in use"
    assert (arrives.sum(axis=2) <= 1).all(), "two arrivals on a rank in a layer"
    if limits.max_moves is not None:
        assert arrives.sum() <= limits.max_moves
    assert not arrives[:, ~capacity.open_R].any(), "an arrival on a rank that leaves"
    for layer, num_experts in enumerate(problem.experts_L.tolist()):
        held, then = set(before[layer].ravel()), set(after[layer].ravel())
        assert held - {-1} <= then, "an expert lost its last copy"
        for row in after[layer]:
            filled = row[row >= 0]
            assert len(filled) == len(set(filled.tolist())), "an expert twice on a rank"
        assert max(then) < num_experts


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_a_load_that_is_no_count_is_refused(bad: float) -> None:
    load = np.array([[1.0, 2.0], [3.0, bad]])
    with pytest.raises(ValueError, match=r"layer 1, expert 1"):
        plan(load, Capacity.of(2, 2))


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3)])
def test_a_load_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dimensions"):
        plan(np.ones(shape), Capacity.of(4, 4))


def test_a_plan_in_force_for_other_ranks_or_layers_is_refused() -> None:
    current = plan(np.ones((2, 4)), Capacity.of(2, 3)).placement
    with pytest.raises(ValueError, match="rank"):
        plan(np.ones((2, 4)), Capacity.of(2, 4), Goal(), current)
    with pytest.raises(ValueError, match="layer"):
        plan(np.ones((3, 4)), Capacity.of(2, 3), Goal(), current)


def test_too_few_slots_are_an_error_that_names_what_is_uncovered() -> None:
    with pytest.raises(InsufficientSlots) as caught:
        plan(np.ones((2, 7)), Capacity.of(2, 3))
    assert len(caught.value.uncovered) == 2, "one expert in each layer"


def test_no_rank_left_is_an_error() -> None:
    with pytest.raises(CapacityError, match="no rank is left"):
        Capacity.of(2, 2, dead=[0], draining=[1])
