"""Carry: give rank after rank exactly its share of the tokens, cutting few experts.

A rank takes experts whole and a piece of one more; the rest of that one is carried to the next
rank. Of the experts not touched yet a rank takes the least loaded, and as many of the most loaded
as it needs to get full with its slots.

*When it always works.* Ranks r have k_r ≥ 2 slots and serve shares x_r in proportion to k_r − 1
(with equal ranks that is: the same), X together, and there are E ≤ 1 + Σ (k_r − 1) experts, that
is, slots ≥ experts + ranks − 1. By induction over the ranks: let r be the next, ρ the carried rest
(at first the most loaded expert), low(j) the load of the j least loaded others and j ≤ k_r − 1 the
most with low(j) ≤ x_r. If j < k_r − 1 then low(j+1) > x_r; the j + 1 least loaded weigh at most
their part of all, so E − 1 < (j+1)·X ÷ x_r, so E − 1 − j < (k_r−1)·(X ÷ x_r − 1) + 1, and as these
are whole numbers at most Σ (k − 1) of the other ranks.
* low(j) + ρ ≥ x_r: j whole, the piece is of ρ. E − j are left, few enough (see above) unless j is
  k_r − 1, and then as well.
* else, j < k_r − 1: ρ and j whole, the piece is of the next, j + 2 ≤ k_r slots. Fewer are left.
* else ρ and k_r − 2 whole, i of them the most loaded and the rest the least, and a piece of the
  next most loaded, with the smallest i that reaches x_r. One does: the k_r − 1 most loaded weigh at
  least (k_r−1)·(X−ρ) ÷ (E−1) ≥ x_r·(X−ρ) ÷ X ≥ x_r − ρ. E − (k_r−1) are left.

Fewer slots would not do for loads without a common part: experts and ranks are then one connected
graph, which takes E + R − 1 copies. With other shares or slots it works as long as no rank is too
fast for its slots; `fill` says where it did. Neighbours: `blocks` (the same in two levels, which
takes fewer steps), `groups` (for fewer slots), `full_fractions` (the recipe).

Shapes: N problems (a layer, or some ranks of one), E experts, R ranks, S slots a rank, each of
the largest problem.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

IDLE = 1e-12
"""Part of all tokens that an expert without load is planned with: it needs a slot all the same."""
NOTHING = 1e-13
"""Part of all tokens below which a rest is rounding."""


@dataclass(frozen=True, eq=False)
class Filled:
    slots_NRS: npt.NDArray[np.int32]
    """−1 = free; experts numbered as the columns of the load."""
    tokens_NRS: Floats
    """What each slot serves."""
    whole_N: Flags
    """All tokens of the problem found a slot."""


def fill(load_NE: Floats, experts_N: Ints, slots_NR: Ints, shares_NR: Floats) -> Filled:
    """Fills the ranks of each problem in their order.

    Args:
        load_NE: tokens; problem n has the first experts_N[n] columns. Without any load every
            expert is planned, and reported, as if it had one token.
        slots_NR: 0 for ranks a problem does not have; these are last.
        shares_NR: what each rank should serve, in any unit.
    """
    state = _State(load_NE, experts_N)
    part_NR = shares_NR / np.maximum(shares_NR.sum(axis=1, keepdims=True), 1e-300)
    last_N = (slots_NR > 0).sum(axis=1) - 1
    steps = [
        state.serve(slots_NR[:, rank], part_NR[:, rank], last_N == rank)
        for rank in range(slots_NR.shape[1])
    ]
    whole_N = (state.low_N >= state.high_N) & (state.rest_N <= state.nothing_N)
    return _filled(state, steps, int(slots_NR.max()), whole_N)


@dataclass(frozen=True, eq=False)
class _Step:
    """What one rank takes in each problem."""

    low_N: Ints
    """First sorted column of `num_low_N` whole experts."""
    num_low_N: Ints
    high_N: Ints
    """Sorted column after the last of `num_high_N` whole experts."""
    num_high_N: Ints
    carried_N: Ints
    """Sorted column of the expert carried here."""
    carried_tokens_N: Floats
    piece_N: Ints
    piece_tokens_N: Floats
    """0 = no piece."""


class _State:
    """Experts not touched yet are the sorted columns from `low_N` to before `high_N`; `rest_N` is
    what is left of the carried one."""

    def __init__(self, load_NE: Floats, experts_N: Ints) -> None:
        num_problems, num_experts = load_NE.shape
        exists_NE = np.arange(num_experts) < experts_N[:, None]
        sum_N = np.where(exists_NE, load_NE, 0.0).sum(axis=1)
        least_N = np.where(sum_N > 0, sum_N * IDLE, 1.0)
        load_NE = np.where(exists_NE, np.maximum(load_NE, least_N[:, None]), np.inf)
        self.order_NE = np.argsort(load_NE, axis=1, kind="stable")
        sorted_NE = np.take_along_axis(load_NE, self.order_NE, 1)
        sorted_NE[~exists_NE] = 0.0
        before_NE = np.zeros((num_problems, num_experts + 1))
        np.cumsum(sorted_NE, axis=1, out=before_NE[:, 1:])
        self.total_N = before_NE[:, -1]
        self.nothing_N = self.total_N * NOTHING
        # Flat views: one gather of precomputed rows is the cheapest step numpy has.
        self.sorted_F, self.before_F = sorted_NE.ravel(), before_NE.ravel()
        self.row_N = np.arange(num_problems) * num_experts
        self.before_row_N = np.arange(num_problems) * (num_experts + 1)
        self.low_N = np.zeros(num_problems, dtype=np.int64)
        self.high_N = experts_N.astype(np.int64)
        self.carried_N = np.zeros(num_problems, dtype=np.int64)
        self.rest_N = np.zeros(num_problems)

    def serve(self, slots_N: Ints, part_N: Floats, is_last_N: Flags) -> _Step:
        """The next rank of each problem takes `part_N` of all tokens; the last takes the rest."""
        self._carry_the_most_loaded(slots_N)
        low_N, high_N, rest_N, nothing_N = self.low_N, self.high_N, self.rest_N, self.nothing_N
        before_N = self.before_F[self.before_row_N + low_N]
        left_N = self.before_F[self.before_row_N + high_N] - before_N + rest_N
        share_N = np.where(slots_N > 0, np.where(is_last_N, left_N, self.total_N * part_N), 0.0)

        columns = np.minimum(low_N + np.arange(max(int(slots_N.max()), 1))[:, None], high_N)
        lowest = self.before_F[columns + self.before_row_N] - before_N
        num_low_N = (lowest <= share_N + nothing_N).sum(axis=0) - 1
        most_N = np.minimum(slots_N - 1, high_N - low_N)
        num_low_N = np.maximum(np.minimum(num_low_N, most_N), 0)
        lacks_N = share_N - lowest[num_low_N, np.arange(len(low_N))]

        cut_N = rest_N < lacks_N - nothing_N
        tokens_N = np.where(cut_N, rest_N, np.clip(lacks_N, 0.0, rest_N))
        piece_N, piece_tokens_N = low_N + num_low_N, lacks_N - rest_N
        num_high_N = np.zeros_like(num_low_N)
        hungry_N = cut_N & (num_low_N == slots_N - 1)
        rows = np.flatnonzero(hungry_N & (high_N - low_N > num_low_N) & (slots_N > 1))
        if len(rows):
            num_high, lacks = self._from_the_top(rows, slots_N[rows], share_N[rows], lowest)
            num_low_N[rows], num_high_N[rows] = slots_N[rows] - 2 - num_high, num_high
            piece_N[rows], piece_tokens_N[rows] = high_N[rows] - 1 - num_high, lacks
        hungry_rows_N = np.zeros(len(low_N), dtype=np.bool_)
        hungry_rows_N[rows] = True
        piece_load_N = self.sorted_F[self.row_N + np.minimum(piece_N, self.order_NE.shape[1] - 1)]
        cut_piece_N = cut_N & (piece_N < high_N) & (~hungry_N | hungry_rows_N)
        piece_tokens_N = np.where(cut_piece_N, np.minimum(piece_tokens_N, piece_load_N), 0.0)

        step = _Step(
            low_N, num_low_N, high_N, num_high_N, self.carried_N, tokens_N, piece_N, piece_tokens_N
        )
        self.carried_N = np.where(cut_piece_N, piece_N, self.carried_N)
        self.rest_N = np.where(cut_piece_N, piece_load_N - piece_tokens_N, rest_N - tokens_N)
        self.low_N = low_N + num_low_N + (cut_piece_N & ~hungry_rows_N)
        self.high_N = high_N - num_high_N - (cut_piece_N & hungry_rows_N)
        return step

    def _carry_the_most_loaded(self, slots_N: Ints) -> None:
        """Where nothing is left of the carried expert, the most loaded untouched one is next."""
        fresh_N = (self.rest_N <= self.nothing_N) & (self.high_N > self.low_N) & (slots_N > 0)
        self.high_N = self.high_N - fresh_N
        self.carried_N = np.where(fresh_N, self.high_N, self.carried_N)
        self.rest_N = np.where(fresh_N, self.sorted_F[self.row_N + self.carried_N], self.rest_N)

    def _from_the_top(
        self, rows: Ints, slots_N: Ints, share_N: Floats, lowest: Floats
    ) -> tuple[Ints, Floats]:
        """For problems whose least loaded experts don't fill the rank: how many of the most
        loaded it takes whole, and what it then lacks of the next."""
        number = np.arange(int(slots_N.max()) - 1)[:, None]
        before_row_N, high_N = self.before_row_N[rows], self.high_N[rows]
        columns = np.maximum(high_N - 1 - number, 0) + before_row_N
        highest = self.before_F[before_row_N + high_N] - self.before_F[columns]
        fits = number <= slots_N - 2
        low = lowest[np.maximum(slots_N - 2 - number, 0), rows]
        reaches = fits & (self.rest_N[rows] + low + highest >= share_N - self.nothing_N[rows])
        num_high_N = np.where(reaches.any(axis=0), reaches.argmax(axis=0), slots_N - 2)
        at = np.arange(len(rows))
        whole = low[num_high_N, at] + np.where(
            num_high_N > 0, highest[np.maximum(num_high_N - 1, 0), at], 0.0
        )
        return num_high_N, share_N - self.rest_N[rows] - whole


def _filled(state: _State, steps: list[_Step], num_slots: int, whole_N: Flags) -> Filled:
    num_problems, num_ranks = len(state.order_NE), len(steps)
    num_low = np.stack([step.num_low_N for step in steps])
    num_high = np.stack([step.num_high_N for step in steps])
    slots_F = np.full(num_problems * num_ranks * num_slots, -1, dtype=np.int32)
    tokens_F = np.zeros(num_problems * num_ranks * num_slots)
    problem = np.broadcast_to(np.arange(num_problems), num_low.shape)
    first_slot = (problem * num_ranks + np.arange(num_ranks)[:, None]) * num_slots

    def put(columns: Ints, slots: Ints, problems: Ints, tokens: Floats | None = None) -> None:
        slots_F[slots] = state.order_NE[problems, columns]
        tokens_F[slots] = (
            state.sorted_F[state.row_N[problems] + columns] if tokens is None else tokens
        )

    for first, count, slot in (
        (np.stack([step.low_N for step in steps]), num_low, first_slot),
        (np.stack([step.high_N for step in steps]) - num_high, num_high, first_slot + num_low),
    ):
        owner = np.repeat(np.arange(count.size), count.ravel())
        nth = np.arange(len(owner)) - (np.cumsum(count) - count.ravel())[owner]
        put(first.ravel()[owner] + nth, slot.ravel()[owner] + nth, problem.ravel()[owner])
    slot = first_slot + num_low + num_high
    tokens = np.stack([step.carried_tokens_N for step in steps])
    served = tokens > state.nothing_N
    columns = np.stack([step.carried_N for step in steps])
    put(columns[served], slot[served], problem[served], tokens[served])
    slot = slot + served
    tokens = np.stack([step.piece_tokens_N for step in steps])
    served = tokens > 0
    columns = np.stack([step.piece_N for step in steps])
    put(columns[served], slot[served], problem[served], tokens[served])
    dims = (num_problems, num_ranks, num_slots)
    return Filled(slots_F.reshape(dims), tokens_F.reshape(dims), whole_N)
