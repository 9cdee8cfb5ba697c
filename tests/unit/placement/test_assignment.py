"""The assignment is exact: compared with scipy, and by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from moe_placement.step.assignment import Weights, assign

Ints = npt.NDArray[np.int64]


def dense(weight_BNN: Ints) -> Weights:
    """Every pair above 0 has a weight of its own."""
    num_problems, num_rows, _ = weight_BNN.shape
    problem, row, column = np.nonzero(weight_BNN)
    first = problem * num_rows
    other = np.zeros((num_problems, num_rows, 1), dtype=np.int64)
    own = weight_BNN[problem, row, column]
    return Weights(first + row, first + column, own, other, np.zeros(num_rows, dtype=np.int64))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Weights, Ints]:
    """Weights and the same as a matrix."""
    num_problems, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    num_kinds, largest = draw(st.integers(1, 3)), draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    other = rng.integers(0, largest + 1, (num_problems, num_rows, num_kinds))
    kinds = rng.integers(0, num_kinds, num_rows)
    weight = other[:, :, kinds]
    own = rng.random(weight.shape) < draw(st.floats(0, 1))
    weight = weight + np.where(own, rng.integers(0, largest + 1, weight.shape), 0)
    problem, row, column = np.nonzero(own)
    first = problem * num_rows
    pairs = weight[problem, row, column]
    return Weights(first + row, first + column, pairs, other, kinds), weight


def test_the_best_pairs_are_not_always_the_heaviest() -> None:
    weight = np.array([[[9, 8], [8, 0]], [[1, 0], [0, 1]]])
    assert assign(dense(weight)).tolist() == [[1, 0], [0, 1]]


def test_without_any_weight_everyone_gets_a_column() -> None:
    assert assign(dense(np.zeros((1, 3, 3), dtype=np.int64))).tolist() == [[0, 1, 2]]


@settings(deadline=None, max_examples=300)
@given(problems())
def test_as_good_as_scipy(case: tuple[Weights, Ints]) -> None:
    weights, weight_BNN = case
    column_BN = assign(weights)
    for weight_NN, column_N in zip(weight_BNN, column_BN, strict=True):
        assert sorted(column_N.tolist()) == list(range(len(column_N)))
        best = weight_NN[linear_sum_assignment(weight_NN, maximize=True)].sum()
        assert weight_NN[np.arange(len(column_N)), column_N].sum() == best


def test_large_problems_too() -> None:
    weight = np.random.default_rng(3).integers(0, 9, (3, 70, 70))
    column_BN = assign(dense(weight))
    for weight_NN, column_N in zip(weight, column_BN, strict=True):
        best = weight_NN[linear_sum_assignment(weight_NN, maximize=True)].sum()
        assert weight_NN[np.arange(70), column_N].sum() == best
