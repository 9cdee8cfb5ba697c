"""What is left to do between the placement in force and a target: who is to come, who is to leave.

Neighbours: `arrivals` and `departures` choose from it what one wave does, `waves` puts them
together.

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank, N copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import FlagsR, SlotsR

IndexN = npt.NDArray[np.int64]
CountLE = npt.NDArray[np.int64]
CountLR = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of experts on ranks, in whichever slot."""

    layer_N: IndexN
    rank_N: IndexN
    expert_N: IndexN

    @classmethod
    def of(cls, copies: Sequence[tuple[int, int, int]]) -> Self:
        """From (layer, rank, expert) each."""
        columns = np.array(copies, dtype=np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    @classmethod
    def joined(cls, parts: Sequence[Copies]) -> Self:
        return cls(
            np.concatenate([part.layer_N for part in parts]),
            np.concatenate([part.rank_N for part in parts]),
            np.concatenate([part.expert_N for part in parts]),
        )

    def where(self, chosen_N: npt.NDArray[np.bool_] | IndexN) -> Copies:
        return Copies(self.layer_N[chosen_N], self.rank_N[chosen_N], self.expert_N[chosen_N])

    @property
    def number(self) -> int:
        return len(self.layer_N)


@dataclass(frozen=True, eq=False)
class Remaining:
    pending: Copies
    """What the target wants and no such rank holds yet."""
    leaving: Copies
    """What live ranks hold and the target does not want there."""
    kept: Copies
    """What live ranks hold and the target wants there."""
    copies_LE: CountLE
    """Copies on live ranks."""
    kept_LE: CountLE
    """Those of them that the target wants too."""
    staying_LE: CountLE
    """Copies on open ranks."""
    free_LR: CountLR
    """Slots that may be filled; none on a rank that is not open."""
    pending_LR: CountLR
    open_R: FlagsR

    @classmethod
    def between(
        cls, current_LRS: SlotsLRS, target_LRS: SlotsLRS, slots_R: SlotsR, open_R: FlagsR
    ) -> Remaining:
        """`current` without the copies on dead ranks; `slots_R` are physical slots."""
        num_layers, num_ranks, _ = current_LRS.shape
        base = int(max(current_LRS.max(initial=0), target_LRS.max(initial=0))) + 1
        have, want = _keys(current_LRS, base), _keys(target_LRS, base)
        pending = _copies(np.setdiff1d(want, have, assume_unique=True), num_ranks, base)
        leaves_N = ~np.isin(have, want, assume_unique=True)
        leaving = _copies(have[leaves_N], num_ranks, base)
        kept = _copies(have[~leaves_N], num_ranks, base)
        held = _copies(have, num_ranks, base)
        filled_LR = (current_LRS >= 0).sum(axis=2)
        return cls(
            pending=pending,
            leaving=leaving,
            kept=kept,
            copies_LE=_count(held.layer_N, held.expert_N, (num_layers, base)),
            kept_LE=_count(kept.layer_N, kept.expert_N, (num_layers, base)),
            staying_LE=_count(held.layer_N, held.expert_N, (num_layers, base), open_R[held.rank_N]),
            free_LR=np.where(open_R, np.maximum(slots_R - filled_LR, 0), 0),
            pending_LR=_count(pending.layer_N, pending.rank_N, (num_layers, num_ranks)),
            open_R=open_R,
        )

    def count_LE(self, copies: Copies) -> CountLE:
        return _count(copies.layer_N, copies.expert_N, self.copies_LE.shape)

    def count_LR(self, copies: Copies) -> CountLR:
        return _count(copies.layer_N, copies.rank_N, self.free_LR.shape)


def _keys(slots_LRS: SlotsLRS, base: int) -> IndexN:
    """One number for each copy, ascending."""
    layer_N, rank_N, slot_N = np.nonzero(slots_LRS >= 0)
    expert_N = slots_LRS[layer_N, rank_N, slot_N]
    return np.unique((layer_N * slots_LRS.shape[1] + rank_N) * base + expert_N)


def _copies(key_N: IndexN, num_ranks: int, base: int) -> Copies:
    place_N, expert_N = np.divmod(key_N, base)
    layer_N, rank_N = np.divmod(place_N, num_ranks)
    return Copies(layer_N, rank_N, expert_N)


def _count(
    row_N: IndexN,
    column_N: IndexN,
    shape: tuple[int, ...],
    weight_N: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.int64]:
    flat = np.bincount(row_N * shape[1] + column_N, weights=weight_N, minlength=shape[0] * shape[1])
    return flat.astype(np.int64).reshape(shape)
