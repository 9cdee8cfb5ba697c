"""Overflow: one round in which every excess flows outwards and fills the room it meets.

Like one phase of Dinic's maximum flow: ranks and experts are reached level by level from the ranks
with too much, each once, so no token goes round in circles; what lies behind is added up on the
way back, and the excess is then handed out in proportion. Rounds are repeated by `residual` until
nothing moves, which proves the flow to be maximal.

Shapes: Q ranks and F experts of all layers, N edges (slots whose expert has other copies); of one
level: D edges down (rank to expert), X experts, O edges out (expert to rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NOTHING = 1e-6
"""Part of a rank's capacity below which an excess is none."""
ROUNDING = 1e-11


@dataclass(frozen=True, eq=False)
class Edges:
    slot_N: Ints
    """Flat slot, rising."""
    rank_N: Ints
    expert_N: Ints
    of_rank_Q: Ints
    """First edge of each rank, and the end."""
    by_expert_N: Ints
    """Edges in the order of experts."""
    of_expert_F: Ints
    """First place of each expert in `by_expert_N`, and the end."""

    @classmethod
    def of(cls, slot_N: Ints, rank_N: Ints, expert_N: Ints, copies_F: Ints, num_ranks: int) -> Self:
        ranks_Q = np.bincount(rank_N, minlength=num_ranks)
        shared_F = np.where(copies_F > 1, copies_F, 0)
        return cls(
            slot_N,
            rank_N,
            expert_N,
            np.concatenate([[0], np.cumsum(ranks_Q)]),
            np.argsort(expert_N, kind="stable"),
            np.concatenate([[0], np.cumsum(shared_F)]),
        )

    def from_ranks(self, rank_M: Ints) -> Ints:
        return _ranges(self.of_rank_Q[rank_M], self.of_rank_Q[rank_M + 1])

    def from_experts(self, expert_M: Ints) -> Ints:
        return self.by_expert_N[_ranges(self.of_expert_F[expert_M], self.of_expert_F[expert_M + 1])]


@dataclass(frozen=True, eq=False)
class _Level:
    down_D: Ints
    into_D: Ints
    """Which expert of the level."""
    out_O: Ints
    parent_O: Ints
    """Which expert of the level."""
    num_experts: int


def spread(
    edges: Edges,
    token_S: Floats,
    loads_Q: Floats,
    capacity_Q: Floats,
    far_L: Floats,
) -> Floats:
    """Moves tokens between slots, in place; of each layer, the most that any rank got rid of.

    Args:
        token_S: of all slots, flat.
        far_L: a layer is searched until it has met room for so many times its excess; 0 = not.
    """
    ranks_per_layer = len(loads_Q) // len(far_L)
    token_N = token_S[edges.slot_N]
    excess_Q = loads_Q - capacity_Q
    room_Q = np.maximum(-excess_Q, 0.0)
    excess_Q[(excess_Q <= NOTHING) | np.repeat(far_L <= 0, ranks_per_layer)] = 0.0
    source_M = np.flatnonzero(excess_Q)
    levels = _levels(edges, token_N, excess_Q, room_Q, far_L)
    behind_Q, limits = _behind(edges, token_N, excess_Q, room_Q, levels)

    part_Q = np.zeros(excess_Q.size)
    reach_M = behind_Q[source_M]
    part_Q[source_M] = np.minimum(1.0, excess_Q[source_M] / np.where(reach_M > 0, reach_M, np.inf))
    for level, (behind_X, limit_D) in zip(levels, limits, strict=True):
        flow_D = part_Q[edges.rank_N[level.down_D]] * limit_D
        token_N[level.down_D] -= flow_D
        flow_X = sum_by(level.into_D, flow_D, level.num_experts)
        part_X = flow_X / np.where(behind_X > 0, behind_X, 1.0)
        rank_O, part_O = edges.rank_N[level.out_O], part_X[level.parent_O]
        token_N[level.out_O] += part_O * behind_Q[rank_O]
        part_Q[rank_O] = part_O
    token_S[edges.slot_N] = np.maximum(token_N, 0.0)

    moved_M = np.minimum(excess_Q[source_M], reach_M)
    part_Q[source_M] = 0.0
    loads_Q += part_Q * room_Q
    loads_Q[source_M] -= moved_M
    moved_Q = np.zeros(excess_Q.size)
    moved_Q[source_M] = moved_M
    return np.asarray(moved_Q.reshape(len(far_L), -1).max(axis=1))


def _levels(
    edges: Edges,
    token_N: Floats,
    excess_Q: Floats,
    room_Q: Floats,
    far_L: Floats,
) -> list[_Level]:
    """Ranks and experts by their distance from an excess."""
    num_layers = len(far_L)
    ranks_per_layer = len(excess_Q) // num_layers
    wanted_L = far_L * excess_Q.reshape(num_layers, -1).sum(axis=1)
    met_L = np.zeros(num_layers)
    reached_Q = excess_Q > 0
    seen_F = np.zeros(len(edges.of_expert_F) - 1, dtype=np.bool_)
    place_F, first_Q = np.empty(seen_F.size, np.int64), np.empty(reached_Q.size, np.int64)
    levels: list[_Level] = []
    front_M = np.flatnonzero(reached_Q)
    while len(front_M):
        down_D = edges.from_ranks(front_M)
        down_D = down_D[(token_N[down_D] > ROUNDING) & ~seen_F[edges.expert_N[down_D]]]
        expert_D = edges.expert_N[down_D]
        expert_X = expert_D[_firsts(expert_D, place_F)]
        place_F[expert_X] = np.arange(len(expert_X))
        seen_F[expert_X] = True
        out_O = edges.from_experts(expert_X)
        num_out_X = edges.of_expert_F[expert_X + 1] - edges.of_expert_F[expert_X]
        parent_O = np.repeat(np.arange(len(expert_X)), num_out_X)
        new_O = ~reached_Q[edges.rank_N[out_O]]
        out_O, parent_O = out_O[new_O], parent_O[new_O]
        first_O = _firsts(edges.rank_N[out_O], first_Q)
        out_O, parent_O = out_O[first_O], parent_O[first_O]
        rank_O = edges.rank_N[out_O]
        reached_Q[rank_O] = True
        levels.append(_Level(down_D, place_F[expert_D], out_O, parent_O, len(expert_X)))
        layer_O = rank_O // ranks_per_layer
        met_L += sum_by(layer_O, room_Q[rank_O], num_layers)
        front_M = rank_O[(met_L < wanted_L)[layer_O]]
    return levels


def _behind(
    edges: Edges, token_N: Floats, excess_Q: Floats, room_Q: Floats, levels: list[_Level]
) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """Room at and behind each rank; of each level, behind its experts and its edges down.

    What lies behind an expert is divided among the ranks that reach it by what they want.
    """
    behind_Q = room_Q.copy()
    limits: list[tuple[Floats, Floats]] = []
    for level in reversed(levels):
        behind_X = sum_by(level.parent_O, behind_Q[edges.rank_N[level.out_O]], level.num_experts)
        rank_D, token_D = edges.rank_N[level.down_D], token_N[level.down_D]
        excess_D = excess_Q[rank_D]
        want_D = np.where(excess_D > 0, np.minimum(token_D, excess_D), token_D)
        want_X = sum_by(level.into_D, want_D, level.num_experts)
        limit_D = np.minimum(token_D, behind_X[level.into_D] * want_D / want_X[level.into_D])
        limits.append((behind_X, limit_D))
        behind_Q += sum_by(rank_D, limit_D, behind_Q.size)
    return behind_Q, limits[::-1]


def sum_by(group_M: Ints, value_M: Floats, num_groups: int) -> Floats:
    """Values of each group, added up in their order."""
    return np.asarray(np.bincount(group_M, value_M, num_groups), dtype=np.float64)


def _firsts(node_M: Ints, scratch: Ints) -> Flags:
    """Which entries name a node for the first time."""
    place_M = np.arange(len(node_M))
    scratch[node_M[::-1]] = place_M[::-1]
    return np.asarray(scratch[node_M] == place_M)


def _ranges(start_M: Ints, end_M: Ints) -> Ints:
    """All numbers from each start to before its end."""
    size_M = end_M - start_M
    before_M = np.cumsum(size_M) - size_M
    return np.repeat(start_M - before_M, size_M) + np.arange(int(size_M.sum()))
