"""Improving an even split in few moves: never worse, within budget, still where nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement_loads
from moe_placement.bound import gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import full_even, step_even, step_even_rows
from moe_placement.even.step_even_scene import Effects, Scene, Taboo, strain
from moe_placement.even.step_even_seats import seated
from moe_placement.even.step_even_whole import whole
from moe_placement.placement import Placement, copies, faults, received
from moe_placement.score import rank_loads
from tests.support.planning_problems import Problem, problems

FREE = CopyLimits()
GOAL = 0.05


def gaps(load: np.ndarray, slots_LRS: np.ndarray, slots: np.ndarray, speeds: np.ndarray):
    placement = Placement.even(slots_LRS)
    bound_L = lower_bound(load, slots, speeds)
    return gap(rank_loads(slots_LRS, placement.fractions_LRS, load), speeds, bound_L)


def valid(slots_LRS: np.ndarray, num_experts: int, slots: np.ndarray) -> bool:
    capacity = Capacity.of(slots.tolist())
    experts_L = np.full(len(slots_LRS), num_experts)
    return list(faults(Placement.even(slots_LRS), experts_L, capacity)) == []


def stays(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether every expert that is on a rank before and after has the same slot there."""
    for before, after in zip(
        old.reshape(-1, old.shape[2]), new.reshape(-1, new.shape[2]), strict=True
    ):
        both = (set(before.tolist()) & set(after.tolist())) - {-1}
        if any(before.tolist().index(e) != after.tolist().index(e) for e in both):
            return False
    return True


@settings(deadline=None, max_examples=60)
@given(
    problems(present=True, closed=False, ragged=False),
    st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from([None, 0, 1, 3, 10]),
)  # fmt: skip
def test_valid_never_worse_and_within_the_budget(
    problem: Problem, goal: float, max_moves: int | None
) -> None:
    assert problem.current is not None
    load, current = problem.load_LE, problem.current.slots_LRS
    slots, speeds = problem.capacity.slots_R, problem.capacity.speeds_R
    given_load, given_slots = load.copy(), current.copy()
    new = step_even.improve(load, current, slots, speeds, FREE, goal, max_moves)
    assert np.array_equal(load, given_load), "the input is left alone"
    assert np.array_equal(current, given_slots), "the input is left alone"
    assert new.dtype == np.int32
    assert valid(new, load.shape[1], slots)
    assert stays(current, new)
    before_L, after_L = gaps(load, current, slots, speeds), gaps(load, new, slots, speeds)
    assert (after_L <= before_L + 1e-9).all()
    kept_L = (new == current).all(axis=(1, 2))
    assert kept_L[before_L <= goal].all(), "what is good enough stays as it is"
    if max_moves is not None:
        assert received(current, new) <= max_moves


@settings(deadline=None, max_examples=150)
@given(problems(present=True, closed=False, ragged=False), st.integers(1, 2))
def test_several_full_ranks_at_once_do_not_get_into_each_others_way(
    problem: Problem, takers: int
) -> None:
    """As with very many ranks, but few enough to meet often."""
    assert problem.current is not None
    load, current = problem.load_LE, problem.current.slots_LRS
    slots, speeds = problem.capacity.slots_R, problem.capacity.speeds_R
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_even_rows, "TAKERS", takers)
        new = step_even.improve(load, current, slots, speeds, FREE, 0.0, None)
    assert valid(new, load.shape[1], slots)
    before_L, after_L = gaps(load, current, slots, speeds), gaps(load, new, slots, speeds)
    assert (after_L <= before_L + 1e-9).all()


@settings(deadline=None, max_examples=40)
@given(problems(present=True, closed=False, ragged=False))
def test_an_unchanged_load_moves_nothing(problem: Problem) -> None:
    """What one search reached another does not leave, even short of the goal."""
    assert problem.current is not None
    slots, speeds = problem.capacity.slots_R, problem.capacity.speeds_R
    once = step_even.improve(
        problem.load_LE, problem.current.slots_LRS, slots, speeds, FREE, GOAL, None
    )
    again = step_even.improve(problem.load_LE, once, slots, speeds, FREE, GOAL, None)
    assert np.array_equal(once, again)


@settings(deadline=None, max_examples=60)
@given(
    problems(present=True, closed=False, ragged=False), st.integers(1, 3), st.integers(0, 2),
    st.integers(0, 2**32 - 1), st.sampled_from([0, None]),
)  # fmt: skip
def test_what_is_missing_comes_and_what_is_too_much_goes(
    problem: Problem, min_copies: int, more: int, seed: int, max_moves: int | None
) -> None:
    """Copies lost at random, ranks with fewer slots than they fill, and copy limits."""
    assert problem.current is not None
    load, current = problem.load_LE, problem.current.slots_LRS.copy()
    num_layers, num_experts = load.shape
    rng = np.random.default_rng(seed)
    current[rng.random(current.shape) < 0.2] = -1
    slots = np.maximum(problem.capacity.slots_R - rng.integers(0, 2, len(current[0])), 0)
    if np.minimum(slots, num_experts).sum() < num_experts:
        slots = problem.capacity.slots_R
    limits = CopyLimits(min_copies, min_copies + more if more else None)
    limits = limits.within_reach(num_experts, slots)
    speeds = problem.capacity.speeds_R
    new = step_even.improve(load, current, slots, speeds, limits, GOAL, max_moves)
    assert valid(new, num_experts, slots)
    counts_LE = copies(new, num_experts)
    assert counts_LE.min() >= limits.min_copies
    assert counts_LE.max() <= limits.most(len(slots))
    if max_moves == 0 and (current >= 0).any(axis=(1, 2)).all():
        start = whole(load, current, slots, speeds, limits)
        assert received(current, new) <= received(current, start)
        assert num_layers == len(new)


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize("shape_key", ["b", "c1", "c3", "d"])
def test_few_moves_keep_up_with_a_drift(shape_key: str, kind: str) -> None:
    """Within 5 % by at most 4 % (12 %) of the slots after ±10 % (±30 %), from a plan of ours."""
    shape = placement_loads.SHAPES[shape_key]
    slots, speeds = np.full(shape.ranks, shape.slots // shape.ranks), np.ones(shape.ranks)
    load = placement_loads.make_load(shape_key, kind, salt=31)[:8]
    old = full_even.plan(load, slots, speeds, FREE)
    assert np.array_equal(step_even.improve(load, old, slots, speeds, FREE, GOAL, None), old)
    for amount, allowed in ((0.1, 0.04), (0.3, 0.12)):
        then = placement_loads.drift(load, amount, np.random.default_rng(31))
        new = step_even.improve(then, old, slots, speeds, FREE, GOAL, None)
        assert placement_loads.faults(new, shape.experts) == []
        assert placement_loads.gap(new, then).max() <= GOAL + 1e-9
        moves = placement_loads.weights_received(old, new) / (len(load) * shape.slots)
        assert moves <= allowed


def test_very_many_ranks_get_much_better() -> None:
    shape = placement_loads.SHAPES["e"]
    slots, speeds = np.full(shape.ranks, 2), np.ones(shape.ranks)
    load = placement_loads.make_load("e", "zipf1.0", salt=31)[:1]
    old = full_even.plan(load, slots, speeds, FREE)
    then = placement_loads.drift(load, 0.1, np.random.default_rng(31))
    new = step_even.improve(then, old, slots, speeds, FREE, GOAL, None)
    assert placement_loads.faults(new, shape.experts) == []
    assert placement_loads.gap(new, then)[0] <= 0.07 < placement_loads.gap(old, then)[0]
    assert placement_loads.weights_received(old, new) <= 0.13 * shape.slots


def test_a_further_copy_into_a_free_slot() -> None:
    load = np.array([[8.0, 2.0, 2.0]])
    current = np.array([[[0, -1], [1, -1], [2, -1]]], dtype=np.int32)
    new = step_even.improve(load, current, np.full(3, 2), np.ones(3), FREE, 0.6, None)
    assert received(current, new) == 1
    assert (new[0, :, 0] == current[0, :, 0]).all()
    assert copies(new, 3)[0, 0] == 2


def test_a_swap_where_no_slot_is_free() -> None:
    load = np.array([[4.0, 4.0, 2.0, 2.0]])
    current = np.array([[[0, 1], [2, 3]]], dtype=np.int32)
    new = step_even.improve(load, current, np.full(2, 2), np.ones(2), FREE, 0.0, None)
    assert received(current, new) == 2
    assert gaps(load, new, np.full(2, 2), np.ones(2))[0] == 0


def test_a_copy_that_retires_moves_nothing() -> None:
    load = np.array([[6.0, 5.0, 1.0]])
    current = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
    new = step_even.improve(load, current, np.full(2, 2), np.ones(2), FREE, 0.0, 0)
    assert received(current, new) == 0
    assert copies(new, 3)[0, 0] == 1


def test_a_budget_goes_where_it_relieves_most() -> None:
    load = np.array([[5.0, 4.0, 2.0, 2.0], [9.0, 9.0, 1.0, 1.0]])
    current = np.array([[[0, 1], [2, 3]]] * 2, dtype=np.int32)
    new = step_even.improve(load, current, np.full(2, 2), np.ones(2), FREE, 0.0, 3)
    assert np.array_equal(new[0], current[0])
    assert gaps(load, new, np.full(2, 2), np.ones(2))[1] == 0
    assert received(current, new) == 2


def test_a_layer_without_load_is_left_alone() -> None:
    current = np.array([[[0, 1], [2, -1]]], dtype=np.int32)
    new = step_even.improve(np.zeros((1, 3)), current, np.full(2, 2), np.ones(2), FREE, 0.0, None)
    assert np.array_equal(new, current)


def test_a_layer_without_copies_is_planned_anew() -> None:
    load = placement_loads.make_load("b", "zipf1.0", salt=31)[:2]
    slots, speeds = np.full(32, 5), np.ones(32)
    planned = full_even.plan(load, slots, speeds, FREE)
    current = np.full((2, 32, 6), -1, dtype=np.int32)
    current[1, :, :5] = planned[1]
    new = step_even.improve(load, current, slots, speeds, FREE, GOAL, 0)
    assert np.array_equal(new[1], current[1])
    assert (np.sort(new[0, :, :5], axis=1) == np.sort(planned[0], axis=1)).all()


def test_a_lost_expert_comes_back_beyond_any_budget() -> None:
    load = np.array([[3.0, 2.0, 1.0, 5.0]])
    current = np.array([[[0, -1], [1, 2]]], dtype=np.int32)
    new = step_even.improve(load, current, np.full(2, 2), np.ones(2), FREE, 9.0, 0)
    assert new.tolist() == [[[0, 3], [1, 2]]]


def test_ranks_that_hold_too_much_find_room_on_each_other() -> None:
    """Where all are full, copies that have others retire until experts without others fit."""
    load = np.array([[4.0, 3.0, 2.0, 1.0]])
    current = np.array([[[0, 1], [2, 3], [2, 3]]], dtype=np.int32)
    slots = np.array([1, 1, 2])
    new = step_even.improve(load, current, slots, np.ones(3), FREE, GOAL, 0)
    assert valid(new, 4, slots)
    assert received(current, new) == 1


def test_copies_above_the_limit_retire_on_the_fullest_ranks() -> None:
    load = np.array([[6.0, 3.0, 1.0, 0.0]])
    current = np.array([[[0, 1], [0, 2], [0, 3]]], dtype=np.int32)
    new = step_even.improve(
        load, current, np.full(3, 2), np.ones(3), CopyLimits(max_copies=2), 9.0, 0
    )
    assert new.tolist() == [[[-1, 1], [0, 2], [0, 3]]]


def test_copies_below_the_limit_come_to_the_lightest_ranks() -> None:
    load = np.array([[6.0, 1.0]])
    current = np.array([[[0, -1], [1, -1], [-1, -1]]], dtype=np.int32)
    new = step_even.improve(
        load, current, np.full(3, 2), np.ones(3), CopyLimits(min_copies=2), 9.0, 0
    )
    assert new.tolist() == [[[0, 1], [1, -1], [0, -1]]]


def test_slow_ranks_are_relieved_first() -> None:
    load = np.array([[4.0, 4.0, 1.0, 1.0]])
    current = np.array([[[0, 1], [2, 3]]], dtype=np.int32)
    speeds = np.array([0.25, 1.0])
    new = step_even.improve(load, current, np.full(2, 2), speeds, FREE, 0.0, None)
    assert sorted(new[0, 0].tolist()) == [2, 3]


def test_who_stays_keeps_the_slot_and_who_comes_takes_the_lowest_free() -> None:
    current = np.array([[[5, 3, -1, 7, -1]]], dtype=np.int32)
    wanted = np.array([[[9, 7, 2, 8, -1]]], dtype=np.int32)
    assert seated(current, wanted).tolist() == [[[9, -1, 2, 7, 8]]]
    assert seated(current, current).tolist() == current.tolist()


def test_effects_are_what_really_happens() -> None:
    """One copy more or less, against the layer counted anew."""
    rng = np.random.default_rng(31)
    load = rng.integers(1, 9, (1, 5)).astype(float)
    slots_LRS = np.array([[[0, 1, 2], [0, 1, 3], [0, 4, -1]]], dtype=np.int32)
    slots, speeds = np.full(3, 3), np.array([1.0, 0.5, 2.0])
    scene = Scene.of(load / 6, slots_LRS, slots, speeds)
    none = np.zeros((1, 6), dtype=np.bool_)
    below = np.array([0.3])
    effects = Effects.of(scene, below, FREE, Taboo(none, none))

    def strains(placement: np.ndarray, ranks: list[int]) -> float:
        levels = Scene.of(load / 6, placement, slots, speeds).level_LR[0, ranks]
        return float(strain(levels, below).sum())

    fewer = slots_LRS.copy()
    fewer[0, 0, 1] = -1  # expert 1 leaves rank 0: what happens on rank 1
    change = strains(fewer, [1]) - strains(slots_LRS, [1])
    assert effects.retire_LRS[0, 0, 1] == pytest.approx(change)
    more = slots_LRS.copy()
    more[0, 2, 2] = 1  # expert 1 comes to rank 2: what happens on ranks 0 and 1
    change = strains(more, [0, 1]) - strains(slots_LRS, [0, 1])
    assert effects.further_LF[0, 1] == pytest.approx(change)
    assert np.isinf(effects.retire_LRS[0, 0, 2]), "the only copy"
    assert effects.retire_LRS[0, 2, 2] == 0, "a free slot"
