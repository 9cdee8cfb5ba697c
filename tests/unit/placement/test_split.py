"""The best split of a placement, by hand; `test_oracles` holds it against linear programs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from moe_api.plan import even_fractions
from moe_placement.score import rank_loads
from moe_placement.split import best_fractions
from tests.support.planning_problems import Problem, problems


def slots(*layers: list[list[int]]) -> np.ndarray:
    return np.array(layers, dtype=np.int32)


def test_shares_so_that_ranks_are_equal() -> None:
    load = np.array([[6.0, 1.0, 3.0]])
    fractions = best_fractions(load, slots([[0, 1], [0, 2]]), np.ones(2))
    assert np.allclose(fractions, [[[4 / 6, 1], [2 / 6, 1]]], rtol=1e-9)


def test_a_slow_rank_serves_less() -> None:
    fractions = best_fractions(np.array([[9.0]]), slots([[0], [0]]), np.array([1.0, 0.5]))
    assert np.allclose(fractions, [[[2 / 3], [1 / 3]]])


def test_each_layer_stops_where_its_own_ranks_are_stuck() -> None:
    """Layer 0: nothing of expert 0 can leave ranks 0 and 1. Layer 1: rank 2 takes its third."""
    load = np.array([[10.0, 2.0], [10.0, 2.0]])
    placed = slots([[0, -1], [0, -1], [1, -1]], [[0, -1], [0, -1], [1, 0]])
    lopsided = np.array([[[1.0, 0], [0, 0], [1, 0]], [[1, 0], [0, 0], [1, 0]]])
    fractions = best_fractions(load, placed, np.ones(3), lopsided)
    loads = rank_loads(placed, fractions, load)
    assert np.allclose(loads, [[5, 5, 2], [4, 4, 4]])


def test_tokens_pass_through_ranks_in_between() -> None:
    """Rank 0 has too much of expert 0, rank 2 nothing to do; only rank 1 knows both."""
    load = np.array([[5.0, 4.0]])
    placed = slots([[0, -1], [0, 1], [1, -1]])
    given_LRS = np.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    loads = rank_loads(placed, best_fractions(load, placed, np.ones(3), given_LRS), load)
    assert np.allclose(loads, 3.0)


def test_experts_without_load_are_split_evenly() -> None:
    given_LRS = np.array([[[1.0, 0.5], [0.0, 0.5]]])
    fractions = best_fractions(
        np.array([[0.0, 4.0]]), slots([[0, 1], [0, 1]]), np.ones(2), given_LRS
    )
    assert np.array_equal(fractions, np.full((1, 2, 2), 0.5))


def test_lost_experts_and_empty_placements_are_left_out() -> None:
    load = np.array([[5.0, 1.0]])
    assert np.array_equal(
        best_fractions(load, slots([[1, -1], [1, -1]]), np.ones(2)), [[[0.5, 0], [0.5, 0]]]
    )
    assert not best_fractions(load, slots([[-1], [-1]]), np.ones(2)).any()


def test_fractions_that_are_best_stay() -> None:
    """Three ranks hold all of it; many splits are level, the one in force is kept."""
    load = np.array([[6.0, 3.0, 3.0]])
    placed = slots([[0, 1], [0, 1], [0, 2]])
    given_LRS = np.array([[[0.25, 5 / 6], [7 / 12, 1 / 6], [1 / 6, 1.0]]])
    kept = best_fractions(load, placed, np.ones(3), given_LRS)
    assert np.allclose(rank_loads(placed, kept, load), 4.0)
    assert np.allclose(kept, given_LRS, rtol=1e-12)


def test_a_copy_that_served_nothing_can_be_used() -> None:
    load = np.array([[8.0]])
    given_LRS = np.array([[[1.0], [0.0]]])
    assert np.allclose(best_fractions(load, slots([[0], [0]]), np.ones(2), given_LRS), 0.5)


@settings(deadline=None, max_examples=60)
@given(problems(present=True, ragged=False))
def test_never_worse_than_even_and_the_same_for_one_layer_alone(problem: Problem) -> None:
    assert problem.current is not None
    placed, speeds = problem.current.slots_LRS, problem.capacity.speeds_R
    found = best_fractions(problem.load_LE, placed, speeds)
    even = even_fractions(placed)
    level_L = (rank_loads(placed, found, problem.load_LE) / speeds).max(axis=1)
    even_level_L = (rank_loads(placed, even, problem.load_LE) / speeds).max(axis=1)
    assert (level_L <= even_level_L * (1 + 1e-9)).all()
    alone = best_fractions(problem.load_LE[:1], placed[:1], speeds)
    assert np.allclose(alone, found[:1], rtol=0, atol=1e-12)
