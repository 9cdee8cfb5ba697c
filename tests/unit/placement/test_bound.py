"""The lower bound: never above what some placement reaches, and tight where it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench import placement_loads
from moe_placement.bound import gap, lower_bound
from moe_placement.placement import copies
from moe_placement.score import rank_loads
from moe_placement.split import best_fractions
from tests.support import split_oracle
from tests.support.planning_problems import Problem, problems


def bound(
    load: list[float], slots: list[int], speeds: list[float] | None = None, **limits: int
) -> float:
    speeds_R = np.ones(len(slots)) if speeds is None else np.array(speeds)
    return float(lower_bound(np.array([load]), np.array(slots), speeds_R, **limits)[0])


def test_all_ranks_together_carry_all_tokens() -> None:
    assert bound([4, 4, 4], [2, 2]) == pytest.approx(6)
    assert bound([4, 4, 4], [2, 2], [1, 0.5]) == pytest.approx(8)


def test_ranks_without_slots_carry_nothing() -> None:
    assert bound([4, 4, 4], [2, 0, 2]) == pytest.approx(6)


def test_a_rank_carries_no_more_than_its_slots_hold() -> None:
    """The rank with one slot serves one expert of load 1 at most, so the other serves 3."""
    assert bound([1, 1, 1, 1], [1, 4]) == pytest.approx(3)


def test_a_hot_expert_needs_copies_and_they_need_slots() -> None:
    """5 slots, 4 experts: one copy more, so half of 12 stays on a rank."""
    assert bound([12, 0, 0, 0], [2, 1, 1, 1]) == pytest.approx(6)
    assert bound([12, 0, 0, 0], [2, 2, 2, 2]) == pytest.approx(3)


def test_limits_of_copies() -> None:
    assert bound([12, 0, 0, 0], [2, 2, 2, 2], max_copies=2) == pytest.approx(6)
    assert bound([12, 0, 0, 0], [2, 2, 2, 2], [1, 1, 0.5, 0.5], max_copies=2) == pytest.approx(6)
    assert bound([12, 0, 0, 0], [3, 3, 2, 2], min_copies=2) == pytest.approx(3)
    assert bound([12, 0, 0, 0], [3, 2, 2, 2], min_copies=2) == pytest.approx(4)
    assert bound([12, 0, 0, 0], [2, 2, 2, 2], min_copies=2) == pytest.approx(6)


def test_without_copies_some_rank_holds_two_of_the_most_loaded() -> None:
    assert bound([5, 5, 5, 1], [2, 2]) == pytest.approx(10)
    assert bound([9, 1, 1, 1], [2, 2]) == pytest.approx(10), "the fullest rank has a second slot"
    assert bound([9, 1, 1, 1], [3, 1]) == pytest.approx(9), "it may be the one with a single slot"
    assert bound([5, 5, 5, 0], [3, 3], max_copies=1) == pytest.approx(10)
    assert bound([5, 5, 5, 1], [3, 3]) == pytest.approx(8), "not so with room for copies"


def test_no_load_has_no_bound_and_no_gap() -> None:
    load = np.zeros((2, 3))
    bound_L = lower_bound(load, np.array([2, 2]), np.ones(2))
    assert bound_L.tolist() == [0, 0]
    assert gap(np.zeros((2, 2)), np.ones(2), bound_L).tolist() == [0, 0]


def test_gap_is_measured_by_speed() -> None:
    assert gap(np.array([[6.0, 4.0]]), np.array([1.0, 0.5]), np.array([5.0])) == pytest.approx(0.6)


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize("shape_key", ["a", "b", "c1", "c2", "c3", "d"])
def test_agrees_with_the_judge_where_ranks_are_alike(shape_key: str, kind: str) -> None:
    shape = placement_loads.SHAPES[shape_key]
    load = placement_loads.make_load(shape_key, kind, salt=3)
    slots = shape.slots // shape.ranks
    for room in (shape.slots, shape.experts + shape.ranks // 2):
        slots_R = np.full(shape.ranks, room // shape.ranks)
        slots_R[: room % shape.ranks] += 1
        ours = lower_bound(load, slots_R, np.ones(shape.ranks))
        judge = placement_loads.lower_bound(load, room, shape.ranks)
        assert np.allclose(ours, judge, rtol=1e-9)
    assert slots >= 1


@settings(deadline=None, max_examples=80)
@given(problems(present=True, closed=False, ragged=False))
def test_no_placement_is_better(problem: Problem) -> None:
    """Any placement with its best split, under the limits it happens to keep."""
    assert problem.current is not None
    slots, load, capacity = problem.current.slots_LRS, problem.load_LE, problem.capacity
    within = (slots >= 0).sum(axis=2) <= capacity.slots_R
    assume(within.all())
    fractions = best_fractions(load, slots, capacity.speeds_R)
    level_L = (rank_loads(slots, fractions, load) / capacity.speeds_R).max(axis=1)
    count = copies(slots, load.shape[1])
    for most in (None, int(count.max())):
        for fewest in (1, int(count.min())):
            bound_L = lower_bound(load, capacity.slots_R, capacity.speeds_R, most, fewest)
            assert (bound_L <= level_L * (1 + 1e-9)).all()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]), min_size=5, max_size=5),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.lists(st.sampled_from([1.0, 0.7, 0.5]), min_size=3, max_size=3),
)
def test_below_the_best_of_all_placements(
    load: list[float], slots: list[int], speeds: list[float]
) -> None:
    assume(sum(slots) >= 5)
    best = split_oracle.enumerated_level(
        np.array(load), split_oracle.placements(5, slots), np.array(speeds)
    )
    assert bound(load, slots, speeds) <= best * (1 + 1e-9)
