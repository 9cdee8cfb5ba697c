"""Extra copies: fill the slots that a balanced placement leaves free.

Copies that `min_copies` asks for come first, then copies of the experts with most load a copy.
They serve nothing at first: they are ready for the loss of a rank, and for other fractions when
the load changes. Neighbours: `full_fractions` (calls it), `copy_limits`.

Shapes: L layers, E experts, R ranks, S slots a rank, N some (layer, expert) pairs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import copies as copies_of
from moe_placement.score import LoadLE

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MANY_RANKS = 4


def add(load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, copies: CopyLimits) -> SlotsLRS:
    """The placement with its free slots filled as far as possible.

    From an empty placement min_copies of all experts find a place whenever they fit.

    Args:
        slots_LRS: free slots of a rank are last.
    """
    slots = _Slots(load_LE, slots_LRS, slots_R, copies)
    slots.one_by_one(slots.lacks_LE)
    for turn in range(int(slots.free_LR.max())):
        slots.one_a_rank(turn)
    slots.one_by_one(slots.may_LE.copy())
    return slots.out_LRS


class _Slots:
    def __init__(
        self, load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, copies: CopyLimits
    ) -> None:
        num_experts = load_LE.shape[1]
        self.load_LE, self.out_LRS, self.min_copies = load_LE, slots_LRS.copy(), copies.min_copies
        self.most = copies.most(int((slots_R > 0).sum()))
        self.count_LE = copies_of(slots_LRS, num_experts)
        self.free_LR = np.minimum(slots_R, num_experts) - (slots_LRS >= 0).sum(axis=2)

    @property
    def lacks_LE(self) -> Flags:
        return self.count_LE < self.min_copies

    @property
    def may_LE(self) -> Flags:
        return self.count_LE < self.most

    def one_by_one(self, wanted_LE: Flags) -> None:
        """One copy a layer at a time goes to the rank with most free slots that can take it.

        Experts that lack copies come first, one expert after another: Gale and Ryser's way to
        find room for all wherever there is any.
        """
        open_L = np.flatnonzero(self.free_LR.any(axis=1) & wanted_LE.any(axis=1))
        while len(open_L):
            priority = self._load_a_copy(open_L)
            priority[self.lacks_LE[open_L]] = np.inf
            priority[~wanted_LE[open_L]] = -1.0
            expert = priority.argmax(axis=1)
            holds = (self.out_LRS[open_L] == expert[:, None, None]).any(axis=2)
            free = np.where(holds, 0, self.free_LR[open_L])
            rank = free.argmax(axis=1)
            fits = free.max(axis=1) > 0
            self._put(open_L[fits], rank[fits], expert[fits])
            full = ~fits | (self.count_LE[open_L, expert] >= self.most)
            wanted_LE[open_L[full], expert[full]] = False
            open_L = open_L[self.free_LR[open_L].any(axis=1) & wanted_LE[open_L].any(axis=1)]

    def one_a_rank(self, turn: int) -> None:
        """Where many ranks have a free slot, each gets a copy of another expert, those with most
        load a copy first; where it holds that one already it gets none this turn."""
        layers = np.flatnonzero((self.free_LR > 0).sum(axis=1) >= MANY_RANKS)
        if not len(layers):
            return
        rank = np.argsort(-self.free_LR[layers], axis=1, kind="stable")
        num_ranks = (self.free_LR[layers] > 0).sum(axis=1)[:, None]
        priority = np.where(self.may_LE[layers], self._load_a_copy(layers), -1.0)
        nth = np.arange(min(int(num_ranks.max()), priority.shape[1]))
        expert = np.argsort(-priority, axis=1, kind="stable")[:, nth]
        rank = np.take_along_axis(rank, (nth + turn) % num_ranks, 1)
        fits = (nth < num_ranks) & np.take_along_axis(self.may_LE[layers], expert, 1)
        fits &= ~(self.out_LRS[layers[:, None], rank] == expert[:, :, None]).any(axis=2)
        layer = np.broadcast_to(layers[:, None], fits.shape)
        self._put(layer[fits], rank[fits], expert[fits])

    def _load_a_copy(self, layers: Ints) -> LoadLE:
        return self.load_LE[layers] / np.maximum(self.count_LE[layers], 1)

    def _put(self, layer_N: Ints, rank_N: Ints, expert_N: Ints) -> None:
        """No two of them on the same rank of a layer, or of the same expert."""
        slot_N = (self.out_LRS[layer_N, rank_N] >= 0).sum(axis=1)
        self.out_LRS[layer_N, rank_N, slot_N] = expert_N
        self.free_LR[layer_N, rank_N] -= 1
        self.count_LE[layer_N, expert_N] += 1
