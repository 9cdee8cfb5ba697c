"""Residual: where tokens could still flow, given who holds which expert.

Experts with several copies and ranks are the nodes of a graph, copies are its edges. A rank that
has too much hands tokens of an expert to the expert's other ranks, these hand on tokens of others,
until ranks with room are met. Two questions are answered here, for all layers at once: where does
an excess go (`settle`, a maximum flow: what remains is stuck whatever the split), and how much
could a copy's tokens find elsewhere (`absorb`). Neighbours: `overflow` (one round of a settling),
`bottleneck` (what is stuck, and the copy that would relieve it), `level` (the best split).

Capacity is the unit of load: a rank of speed 1 takes 1. Shapes: L layers, E logical experts,
R ranks, S physical slots a rank; flat: Q = L·R ranks, F = L·E experts, N edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS, even_fractions
from moe_placement.capacity import SpeedsR
from moe_placement.score import LoadLE
from moe_placement.step import overflow
from moe_placement.step.overflow import NOTHING, ROUNDING, Edges
from moe_placement.step.slot_arrays import sum_slots

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_HOPS = 16
"""So many ranks away room still counts for `absorb`; `settle` knows no such limit."""
FAR = 2.0
"""An excess looks first no further than for twice the room it needs, then for more and more."""
UNLIMITED = 1e6


@dataclass(frozen=True, eq=False)
class Absorb:
    """Room behind edges. Exact where the graph is a tree, as it is when a placement has no more
    copies than balance needs; on cycles the same room can count twice."""

    by_rank_N: Floats
    """What the edge's rank could take of the expert's tokens: its room, and what it can hand on."""
    by_others_N: Floats
    """What the expert's other ranks could take."""


class Residual:
    """Tokens in slots of some layers. `token_LRS` is its own array, changed by `settle`."""

    def __init__(
        self, load_LE: LoadLE, slots_LRS: SlotsLRS, token_LRS: Floats, speeds_R: SpeedsR
    ) -> None:
        """
        Args:
            load_LE: in parts of the target, so that a rank of speed 1 should serve 1 at most.
            token_LRS: what each slot serves, all tokens of each expert that has a slot.
        """
        self.load_LE = load_LE
        self.speeds_R = speeds_R
        self.num_layers, self.num_ranks, self.num_slots = slots_LRS.shape
        self.num_experts = load_LE.shape[1]
        self.place(slots_LRS, token_LRS)

    @classmethod
    def even(cls, load_LE: LoadLE, slots_LRS: SlotsLRS, speeds_R: SpeedsR) -> Self:
        """Every expert's tokens split evenly, then settled."""
        layers = np.arange(len(slots_LRS))[:, None, None]
        token_LRS = np.where(slots_LRS >= 0, load_LE[layers, np.maximum(slots_LRS, 0)], 0.0)
        out = cls(load_LE, slots_LRS, token_LRS * even_fractions(slots_LRS), speeds_R)
        out.settle()
        return out

    def change(self, slots_LRS: SlotsLRS, by_rank_N: Floats) -> None:
        """Takes another placement of the same layers. What changed slots served goes to the other
        copies of their experts, by the room behind them.

        Args:
            by_rank_N: of `absorb`, before the change.
        """
        token_LRS, size = self.token_LRS.copy(), self.copies_F.size
        changed = np.nonzero((self.slots_LRS != slots_LRS) & (self.slots_LRS >= 0))
        expert_M = changed[0] * self.num_experts + self.slots_LRS[changed]
        given_F = overflow.sum_by(expert_M, token_LRS[changed], size)
        token_LRS[changed] = 0.0
        weight_S = np.full(slots_LRS.size, NOTHING)
        weight_S[self.edges.slot_N] += by_rank_N
        slot_M = np.flatnonzero(slots_LRS.reshape(-1) >= 0)
        expert_M = slot_M // slots_LRS[0].size * self.num_experts
        expert_M += slots_LRS.reshape(-1)[slot_M]
        takes_M = given_F[expert_M] > 0
        slot_M, expert_M = slot_M[takes_M], expert_M[takes_M]
        all_F = overflow.sum_by(expert_M, weight_S[slot_M], size)
        token_LRS.reshape(-1)[slot_M] += given_F[expert_M] * weight_S[slot_M] / all_F[expert_M]
        self.place(slots_LRS, token_LRS)

    def place(self, slots_LRS: SlotsLRS, token_LRS: Floats) -> None:
        """Takes another placement of the same layers, and what each slot serves then."""
        self.slots_LRS, self.token_LRS = slots_LRS, token_LRS
        held = slots_LRS.reshape(-1) >= 0
        first = np.arange(self.num_layers)[:, None, None] * self.num_experts
        expert = (slots_LRS + first).reshape(-1)
        size = self.num_layers * self.num_experts
        self.copies_F = np.bincount(expert[held], minlength=size)
        slot_N = np.flatnonzero(held & (self.copies_F[expert] > 1))
        self.edges = Edges.of(slot_N, slot_N // self.num_slots, expert[slot_N], self.copies_F,
                              self.num_layers * self.num_ranks)  # fmt: skip
        self.capacity_Q = np.tile(self.speeds_R, self.num_layers)
        self.loads_Q = sum_slots(token_LRS).reshape(-1)

    def excess_Q(self) -> Floats:
        excess_Q = self.loads_Q - self.capacity_Q
        return np.where(excess_Q > NOTHING, excess_Q, 0.0)

    def room_Q(self) -> Floats:
        return np.asarray(np.maximum(self.capacity_Q - self.loads_Q, 0.0))

    def stuck_L(self) -> Floats:
        """Excess of each layer; after `settle` no split of this placement has less."""
        return np.asarray(self.excess_Q().reshape(self.num_layers, self.num_ranks).sum(axis=1))

    def settle(self) -> None:
        """Moves every excess as far as it goes. No layer's result depends on the others."""
        far_L = np.full(self.num_layers, FAR)
        token_S = self.token_LRS.reshape(-1)
        while (far_L > 0).any():
            moved_L = overflow.spread(self.edges, token_S, self.loads_Q, self.capacity_Q, far_L)
            further_L = np.minimum(far_L * FAR * FAR, UNLIMITED)
            at_rest_L = np.where(far_L < UNLIMITED, UNLIMITED, 0.0)
            far_L = np.where(moved_L > NOTHING, further_L, np.where(far_L > 0, at_rest_L, 0.0))

    def absorb(self) -> Absorb:
        edges, room_Q = self.edges, self.room_Q()
        token_N = self.token_LRS.reshape(-1)[edges.slot_N]
        room_N = room_Q[edges.rank_N]
        by_rank_N = room_N
        for _ in range(MAX_HOPS):
            all_F = overflow.sum_by(edges.expert_N, by_rank_N, self.copies_F.size)
            by_others_N = all_F[edges.expert_N] - by_rank_N
            by_others_N[by_others_N < ROUNDING] = 0.0
            on_N = np.minimum(token_N, by_others_N)
            on_Q = overflow.sum_by(edges.rank_N, on_N, room_Q.size)
            further_N = room_N + on_Q[edges.rank_N] - on_N
            if np.array_equal(further_N, by_rank_N):
                break
            by_rank_N = further_N
        return Absorb(by_rank_N, by_others_N)
