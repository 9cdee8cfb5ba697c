"""Assignment: rows to columns, one each, so that the weights of the pairs add up to the most.

The Hungarian method for whole numbers, many problems at once: an alternating forest grows from all
rows without a column, one way to a free column in each tree is turned round, and where there is
none, prices fall by the least that makes one more pair worth its price. Few pairs have a weight of
their own; of the others the weight depends on the kind of the column only, so that a row is looked
at in as many steps as it has such pairs. Neighbours: `relabel` (its only caller).

Shapes: B problems of N rows and N columns, D kinds of columns; flat: row or column
number + N · problem. K pairs, or rows reached in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FAR = 1 << 60


@dataclass(frozen=True, eq=False)
class Weights:
    """Whole numbers ≥ 0."""

    row_K: Ints
    """Flat, ascending."""
    column_K: Ints
    """Flat, in the problem of its row; a pair once."""
    own_K: Ints
    """Weight of the pair, no less than that of the row's other pairs with this kind of column."""
    other_BND: Ints
    """Weight of a row's other pairs, by the kind of the column."""
    kind_N: Ints
    """Of the columns of every problem."""


def assign(weights: Weights) -> Ints:
    """Column of each row, int64 [B, N], numbered within its problem, with the largest sum."""
    forest = _Forest(weights)
    while forest.grow():
        forest.turn_ways()
    num_problems, num_rows, _ = weights.other_BND.shape
    return np.asarray(forest.column_R.reshape(num_problems, num_rows) % num_rows)


class _Forest:
    """All arrays are flat over problems: R rows, C columns."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.num_problems, self.num_rows, self.num_kinds = weights.other_BND.shape
        size = self.num_problems * self.num_rows
        self.other_RD = weights.other_BND.reshape(size, -1)
        self.first_R = np.searchsorted(weights.row_K, np.arange(size + 1))
        self.price_R = self.other_RD.max(axis=1)
        np.maximum.at(self.price_R, weights.row_K, weights.own_K)
        self.price_C = np.zeros(size, dtype=np.int64)
        self.column_R = np.full(size, -1)
        self.row_C = np.full(size, -1)
        self.base_C = np.arange(size) // self.num_rows * self.num_kinds
        self.base_C += np.tile(weights.kind_N, self.num_problems)

    def grow(self) -> bool:
        """From all free rows until every problem that has some knows a way; whether any has."""
        free_R = self.column_R < 0
        if not free_R.any():
            return False
        size, num_base = len(free_R), self.num_problems * self.num_kinds
        # What a column's price is above its best pair with a reached row, and that row: over
        # pairs with a weight of their own, and over the others of its kind.
        self.short_C, self.parent_C = np.full(size, FAR), np.full(size, -1)
        self.short_D, self.parent_D = np.full(num_base, FAR), np.full(num_base, -1)
        self.root_R = np.where(free_R, np.arange(size), -1)
        self.in_tree_C = np.zeros(size, dtype=np.bool_)
        self.tree_parent_C = np.full(size, -1)
        self.end_R = np.full(size, -1)
        self.done_B = ~self._by_problem(free_R).any(axis=1)
        row_K = np.flatnonzero(free_R)
        while True:
            self._reach(row_K)
            short_C, parent_C = self._best()
            column_K = np.flatnonzero((short_C == 0) & ~self.in_tree_C)
            parent_K = parent_C[column_K]
            growing_K = self.end_R[self.root_R[parent_K]] < 0
            column_K, parent_K = column_K[growing_K], parent_K[growing_K]
            root_K = self.root_R[parent_K]
            self.in_tree_C[column_K] = True
            self.tree_parent_C[column_K] = parent_K
            row_K = self.row_C[column_K]
            ends_K = row_K < 0
            self.end_R[root_K[ends_K][::-1]] = column_K[ends_K][::-1]
            row_K, root_K = row_K[~ends_K], root_K[~ends_K]
            self.root_R[row_K] = root_K
            if not len(row_K) and not ends_K.any():
                self.done_B |= self._by_problem(self.end_R >= 0).any(axis=1)
                if self.done_B.all():
                    return True
                self._lower_prices(short_C)

    def turn_ways(self) -> None:
        """One way of each tree: its pairs change partners, so that one row more has one."""
        column_K = self.end_R[self.end_R >= 0]
        while len(column_K):
            row_K = self.tree_parent_C[column_K]
            next_K = self.column_R[row_K]
            self.column_R[row_K], self.row_C[column_K] = column_K, row_K
            column_K = next_K[next_K >= 0]

    def _by_problem(self, values_R: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return values_R.reshape(self.num_problems, self.num_rows)

    def _reach(self, row_K: Ints) -> None:
        """Columns learn what newly reached rows would give."""
        weights = self.weights
        size_K = self.first_R[row_K + 1] - self.first_R[row_K]
        before_K = np.cumsum(size_K) - size_K
        pair_P = np.repeat(self.first_R[row_K] - before_K, size_K) + np.arange(int(size_K.sum()))
        row_P, column_P = weights.row_K[pair_P], weights.column_K[pair_P]
        short_P = self.price_R[row_P] + self.price_C[column_P] - weights.own_K[pair_P]
        _lower(self.short_C, self.parent_C, column_P, short_P, row_P)
        base_KD = (row_K // self.num_rows * self.num_kinds)[:, None] + np.arange(self.num_kinds)
        short_KD = self.price_R[row_K][:, None] - self.other_RD[row_K]
        row_KD = np.repeat(row_K, self.num_kinds)
        _lower(self.short_D, self.parent_D, base_KD.ravel(), short_KD.ravel(), row_KD)

    def _best(self) -> tuple[Ints, Ints]:
        """Of each column, over all its pairs with reached rows."""
        other_C = self.short_D[self.base_C] + self.price_C
        own = self.short_C <= other_C
        return (
            np.where(own, self.short_C, other_C),
            np.where(own, self.parent_C, self.parent_D[self.base_C]),
        )

    def _lower_prices(self, short_C: Ints) -> None:
        """In problems without a way, until one more column fits."""
        outside_C = ~self.in_tree_C
        least_B = self._by_problem(np.where(outside_C, short_C, FAR)).min(axis=1)
        least_B = np.where(self.done_B, 0, least_B)
        least_R = np.repeat(least_B, self.num_rows)
        self.price_R -= np.where(self.root_R >= 0, least_R, 0)
        self.price_C += np.where(self.in_tree_C, least_R, 0)
        self.short_C -= np.where(outside_C, least_R, 0)
        self.short_D -= np.repeat(least_B, self.num_kinds)


def _lower(short: Ints, parent: Ints, at_P: Ints, short_P: Ints, row_P: Ints) -> None:
    """short[at] = min(short[at], short_P), and the lowest row that gave a new minimum."""
    before_P = short[at_P]
    np.minimum.at(short, at_P, short_P)
    new_P = (short_P < before_P) & (short_P == short[at_P])
    at_N, row_N = at_P[new_P][::-1], row_P[new_P][::-1]
    order = np.argsort(-row_N, kind="stable")
    parent[at_N[order]] = row_N[order]
