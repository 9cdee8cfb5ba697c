"""Polish: the last percents of layers with few slots, where one exchange is much.

Every placement that differs in one copy, or in one exchange of copies between two ranks, is tried
with its best split; the best of them not yet seen is next, better or not, and the best ever seen is
kept. Neighbours: `full_fractions` (its only caller), `split` (judges each).

Shapes: L layers, E experts, R ranks, S slots a rank, C all slots that may be used (cells), N
placements tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.bound import BoundL
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import copies as copies_of
from moe_placement.placement import holders
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_SLOTS_TRIED = 5000
"""Slots of all placements next to one: bounds the size of layers this is for."""
PATIENCE = 8
"""Steps without a better placement before a layer is given up."""
MAX_STEPS = 40
GAIN = 1e-6


def affordable(num_experts: int, slots_R: SlotsR) -> bool:
    cells = int(slots_R.sum())
    return cells * (cells * num_experts + cells * cells // 2) <= MAX_SLOTS_TRIED


def polish(
    load_LE: LoadLE,
    slots_LRS: SlotsLRS,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    copies: CopyLimits,
    goal_L: BoundL,
) -> tuple[SlotsLRS, FractionsLRS]:
    """The best placements found near these, with their best fractions.

    Args:
        slots_LRS: valid and within the limits.
        goal_L: largest load ÷ speed at which a layer is done.
    """
    edits = _Edits.of(slots_R, load_LE.shape[1])
    now_LRS, best_LRS = slots_LRS.copy(), slots_LRS.copy()
    best_L = _levels(load_LE, now_LRS, speeds_R)
    seen = edits.names(np.arange(len(now_LRS)), now_LRS)
    stale_L = np.zeros(len(now_LRS), dtype=np.int64)
    for _ in range(MAX_STEPS):
        open_L = np.flatnonzero((best_L > goal_L) & (stale_L < PATIENCE))
        layer_N, found_NRS = edits.around(open_L, now_LRS[open_L], copies)
        name_N = edits.names(layer_N, found_NRS)
        fresh_N = ~np.isin(name_N, seen)
        layer_N, found_NRS, name_N = layer_N[fresh_N], found_NRS[fresh_N], name_N[fresh_N]
        if not len(layer_N):
            break
        level_N = _levels(load_LE[layer_N], found_NRS, speeds_R)
        # The lowest of each layer; the first of equals.
        order_N = np.lexsort((level_N, layer_N))
        first = order_N[np.flatnonzero(np.diff(layer_N[order_N], prepend=-1))]
        layers = layer_N[first]
        now_LRS[layers] = found_NRS[first]
        seen = np.concatenate([seen, name_N[first]])
        stale_L[open_L] += 1
        better = level_N[first] < best_L[layers] * (1 - GAIN)
        best_L[layers[better]] = level_N[first][better]
        best_LRS[layers[better]] = found_NRS[first][better]
        stale_L[layers[better]] = 0
        stale_L[np.setdiff1d(open_L, layers)] = PATIENCE
    return best_LRS, best_fractions(load_LE, best_LRS, speeds_R)


def _levels(load_LE: LoadLE, slots_LRS: SlotsLRS, speeds_R: SpeedsR) -> Floats:
    fractions_LRS = best_fractions(load_LE, slots_LRS, speeds_R)
    return np.asarray((rank_loads(slots_LRS, fractions_LRS, load_LE) / speeds_R).max(axis=1))


@dataclass(frozen=True, eq=False)
class _Edits:
    """All edits of a placement: one copy for another, and two copies for each other."""

    num_experts: int
    rank_C: Ints
    slot_C: Ints
    pair_P2: Ints
    """Cells on different ranks."""
    word_RE: npt.NDArray[np.uint64]
    """A placement's name is the sum of the words of its copies, whatever their slots."""

    @classmethod
    def of(cls, slots_R: SlotsR, num_experts: int) -> _Edits:
        rank_C = np.repeat(np.arange(len(slots_R)), slots_R)
        slot_C = np.concatenate([np.arange(slots) for slots in slots_R])
        one, other = np.triu_indices(len(rank_C), 1)
        apart = rank_C[one] != rank_C[other]
        words = np.random.default_rng(1).integers(
            0, 2**63, (len(slots_R), num_experts), dtype=np.uint64
        )
        return cls(num_experts, rank_C, slot_C, np.stack([one, other], axis=1)[apart], words)

    def names(self, layer_N: Ints, slots_NRS: SlotsLRS) -> npt.NDArray[np.uint64]:
        ranks = np.arange(slots_NRS.shape[1])[None, :, None]
        word_NRS = self.word_RE[ranks, np.maximum(slots_NRS, 0)]
        held = np.where(slots_NRS >= 0, word_NRS, np.uint64(0))
        salt_N = layer_N.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.asarray(held.sum(axis=(1, 2), dtype=np.uint64) + salt_N, dtype=np.uint64)

    def around(
        self, layers: Ints, slots_LRS: SlotsLRS, copies: CopyLimits
    ) -> tuple[Ints, SlotsLRS]:
        """All valid placements one edit away from each: the layer of each, and the placement."""
        count_LE = copies_of(slots_LRS, self.num_experts)
        holds_LRE = holders(slots_LRS, self.num_experts)
        cell_LC = slots_LRS[:, self.rank_C, self.slot_C]
        most = copies.most(slots_LRS.shape[1])
        held_LC = np.maximum(cell_LC, 0)

        may_leave_LC = (cell_LC < 0) | (
            np.take_along_axis(count_LE, held_LC, 1) > copies.min_copies
        )
        may_come_LCE = ~holds_LRE[:, self.rank_C] & (count_LE < most)[:, None, :]
        layer_N, cell_N, expert_N = np.nonzero(may_leave_LC[:, :, None] & may_come_LCE)
        replaced = slots_LRS[layer_N]
        rows = np.arange(len(layer_N))
        replaced[rows, self.rank_C[cell_N], self.slot_C[cell_N]] = expert_N

        one, other = self.pair_P2.T
        at = np.arange(len(slots_LRS))[:, None]
        one_LP, other_LP = cell_LC[:, one], cell_LC[:, other]
        goes = (one_LP < 0) | ~holds_LRE[at, self.rank_C[other], np.maximum(one_LP, 0)]
        comes = (other_LP < 0) | ~holds_LRE[at, self.rank_C[one], np.maximum(other_LP, 0)]
        swap_N, pair_N = np.nonzero(goes & comes & (one_LP != other_LP))
        swapped = slots_LRS[swap_N]
        rows, one, other = np.arange(len(swap_N)), one[pair_N], other[pair_N]
        swapped[rows, self.rank_C[one], self.slot_C[one]] = cell_LC[swap_N, other]
        swapped[rows, self.rank_C[other], self.slot_C[other]] = cell_LC[swap_N, one]
        return layers[np.concatenate([layer_N, swap_N])], np.concatenate([replaced, swapped])
