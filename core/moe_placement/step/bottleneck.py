"""Bottlenecks: where an excess is stuck, and which expert's copy elsewhere would let it out.

An excess that `Residual.settle` could not move is stuck in a set of full ranks: every expert that
they serve has all its copies on them. One more copy of such an expert, on a rank outside, opens the
set. How much would leave through each expert is found by messages along the copies, like
`Residual.absorb`; experts that share an excess form one bottleneck. Neighbours: `residual` (the
flow), `opening` (the slots outside), `step_fractions` (the recipe).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; flat: Q = L·R ranks, F = L·E
experts, N edges; B bottlenecks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_placement.step import overflow
from moe_placement.step.overflow import NOTHING, ROUNDING
from moe_placement.step.residual import MAX_HOPS, Residual

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEARLY = 0.999
"""Experts that let out this part of what the best does are as good."""


@dataclass(frozen=True, eq=False)
class Bottlenecks:
    """By layer, the worst first."""

    layer_B: Ints
    expert_B: Ints
    """The one to copy, numbered within its layer: of those under nearly the most pressure the one
    with most tokens."""
    excess_B: Floats
    """What would leave through it, given room."""

    def only(self, keep_B: Flags) -> Bottlenecks:
        return Bottlenecks(self.layer_B[keep_B], self.expert_B[keep_B], self.excess_B[keep_B])


@dataclass(frozen=True, eq=False)
class Pressure:
    by_rank_Q: Floats
    """Excess on the rank, and what could be pushed onto it from others."""
    by_expert_F: Floats
    """What would leave through the expert, given room."""
    inside_N: Flags
    """Edges along which an excess presses."""


def find(residual: Residual, pressure: Pressure) -> Bottlenecks:
    """Every bottleneck of all layers, once each."""
    by_expert_F = pressure.by_expert_F
    label_F = _labels(residual, pressure)
    expert_B = np.flatnonzero(by_expert_F > NOTHING)
    label_B = label_F[expert_B]
    most_Q = np.zeros(residual.capacity_Q.size)
    np.maximum.at(most_Q, label_B, by_expert_F[expert_B])
    near_B = by_expert_F[expert_B] >= NEARLY * most_Q[label_B]
    expert_B, label_B = expert_B[near_B], label_B[near_B]
    order_B = np.lexsort((expert_B, -residual.load_LE.reshape(-1)[expert_B], label_B))
    first_B = np.diff(label_B[order_B], prepend=-1) != 0
    expert_B = expert_B[order_B[first_B]]
    layer_B, excess_B = expert_B // residual.num_experts, by_expert_F[expert_B]
    order_B = np.lexsort((expert_B, -excess_B, layer_B))
    return Bottlenecks(
        layer_B[order_B], expert_B[order_B] % residual.num_experts, excess_B[order_B]
    )


def press(residual: Residual) -> Pressure:
    """How hard the excess that is left presses on ranks and experts."""
    edges, excess_Q = residual.edges, residual.excess_Q()
    token_N = residual.token_LRS.reshape(-1)[edges.slot_N]
    in_N = np.zeros(len(token_N))
    for _ in range(MAX_HOPS):
        by_rank_Q = excess_Q + overflow.sum_by(edges.rank_N, in_N, excess_Q.size)
        out_N = np.minimum(token_N, by_rank_Q[edges.rank_N] - in_N)
        out_N[out_N < ROUNDING] = 0.0
        by_expert_F = overflow.sum_by(edges.expert_N, out_N, residual.copies_F.size)
        before_N, in_N = in_N, by_expert_F[edges.expert_N] - out_N
        in_N[in_N < ROUNDING] = 0.0
        if np.array_equal(in_N, before_N):
            break
    rank_M, expert_M, token_M = _single_copies(residual)
    by_expert_F[expert_M] = np.minimum(token_M, by_rank_Q[rank_M])
    return Pressure(by_rank_Q, by_expert_F, (out_N > NOTHING) | (in_N > NOTHING))


def _labels(residual: Residual, pressure: Pressure) -> Ints:
    """Bottleneck that each expert belongs to: the lowest flat rank in it."""
    rank_N = residual.edges.rank_N[pressure.inside_N]
    expert_N = residual.edges.expert_N[pressure.inside_N]
    label_Q = np.arange(residual.capacity_Q.size)
    label_F = np.full(residual.copies_F.size, residual.capacity_Q.size)
    while True:
        np.minimum.at(label_F, expert_N, label_Q[rank_N])
        if np.array_equal(label_F[expert_N], label_Q[rank_N]):
            break
        np.minimum.at(label_Q, rank_N, label_F[expert_N])
    rank_M, expert_M, _ = _single_copies(residual)
    label_F[expert_M] = label_Q[rank_M]
    return label_F


def _single_copies(residual: Residual) -> tuple[Ints, Ints, Floats]:
    """Rank, expert and tokens of the experts with one copy."""
    slot_M = np.flatnonzero(residual.slots_LRS.reshape(-1) >= 0)
    rank_M = slot_M // residual.num_slots
    expert_M = residual.slots_LRS.reshape(-1)[slot_M].astype(np.int64)
    expert_M += rank_M // residual.num_ranks * residual.num_experts
    alone_M = residual.copies_F[expert_M] == 1
    token_M = residual.token_LRS.reshape(-1)[slot_M]
    return rank_M[alone_M], expert_M[alone_M], token_M[alone_M]
