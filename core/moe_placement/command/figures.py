"""How a placement does under a load, in the figures of peers: imbalance, balancedness, gap.

Loads of ranks are counted per speed: a rank at 0.7 with 70 tokens is as full as one at 1 with 100.
A layer without tokens is perfect: imbalance 1, gap 0.

Shapes: L MoE layers, E logical experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_placement import bound, score
from moe_placement.capacity import Capacity, FlagsR, SlotsR, SpeedsR
from moe_placement.command.load_files import Load
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement
from moe_placement.score import RankLoadsLR

FiguresL = npt.NDArray[np.float64]

NO_LIMITS = CopyLimits()


@dataclass(frozen=True, eq=False)
class Figures:
    tokens_LR: RankLoadsLR
    """Tokens that each rank serves."""
    relative_LR: npt.NDArray[np.float64]
    """Load ÷ (speed × what is fair); NaN where a rank takes no part."""
    largest_L: FiguresL
    """Largest load ÷ speed."""
    bound_L: FiguresL
    """No placement has a smaller one."""
    imbalance_L: FiguresL
    """Largest ÷ fair."""
    gap_L: FiguresL
    """Largest ÷ bound − 1."""
    missing_LE: npt.NDArray[np.bool_]
    """Experts with tokens and without a copy."""

    @property
    def worst(self) -> int:
        """The layer with the largest imbalance."""
        return int(self.imbalance_L.argmax())

    def to_json(self) -> dict[str, Any]:
        """Worst layer and mean of all layers, then each layer."""
        return {
            "gap_worst": float(self.gap_L.max()),
            "gap_mean": float(self.gap_L.mean()),
            "imbalance": float(self.imbalance_L.max()),
            "imbalance_mean": float(self.imbalance_L.mean()),
            "balancedness": float(1 / self.imbalance_L.max()),
            "balancedness_mean": float((1 / self.imbalance_L).mean()),
            "uncovered_experts": int(self.missing_LE.sum()),
            "layers": [
                {
                    "layer": layer,
                    "tokens": float(self.tokens_LR[layer].sum()),
                    "largest": float(self.largest_L[layer]),
                    "bound": float(self.bound_L[layer]),
                    "imbalance": float(self.imbalance_L[layer]),
                    "balancedness": float(1 / self.imbalance_L[layer]),
                    "excess": float(self.imbalance_L[layer] - 1),
                    "gap": float(self.gap_L[layer]),
                }
                for layer in range(len(self.gap_L))
            ],
        }


def figures(
    placement: Placement,
    load: Load,
    capacity: Capacity,
    taking_part_R: FlagsR | None = None,
    copies: CopyLimits = NO_LIMITS,
) -> Figures:
    """What `placement` does under the load.

    Args:
        taking_part_R: ranks that share the load; absent = the open ones.
        copies: what the bound may count on, and has to.
    """
    load_LE = load.load_LE
    part_R = capacity.open_R if taking_part_R is None else taking_part_R
    tokens_LR = score.rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)
    speeds_R = capacity.speeds_R[part_R]
    total_L = load_LE.sum(axis=1)
    fair_L = total_L / speeds_R.sum()
    level_LR = tokens_LR / capacity.speeds_R
    largest_L = level_LR.max(axis=1)
    bound_L = _bound(load, capacity.slots_R[part_R], speeds_R, copies)
    loaded_L = total_L > 0
    relative_LR = np.divide(
        level_LR, fair_L[:, None], out=np.zeros(level_LR.shape), where=loaded_L[:, None]
    )
    relative_LR[:, ~part_R & ~(placement.slots_LRS >= 0).any(axis=(0, 2))] = np.nan
    held_LE = np.zeros(load_LE.shape, dtype=np.bool_)
    layer_N, rank_N, slot_N = np.nonzero(placement.slots_LRS >= 0)
    held_LE[layer_N, placement.slots_LRS[layer_N, rank_N, slot_N]] = True
    imbalance_L = np.divide(largest_L, fair_L, out=np.ones(len(fair_L)), where=loaded_L)
    return Figures(
        tokens_LR=tokens_LR,
        relative_LR=relative_LR,
        largest_L=largest_L,
        bound_L=bound_L,
        imbalance_L=np.maximum(imbalance_L, 1.0),
        gap_L=np.maximum(bound.gap(tokens_LR, capacity.speeds_R, bound_L), 0.0),
        missing_LE=(load_LE > 0) & ~held_LE,
    )


def _bound(load: Load, slots_R: SlotsR, speeds_R: SpeedsR, copies: CopyLimits) -> FiguresL:
    """What no placement beats, layer by layer; layers of as many experts in one go."""
    bound_L = np.zeros(len(load.load_LE))
    for experts in np.unique(load.experts_L).tolist():
        rows = np.flatnonzero(load.experts_L == experts)
        limits = copies.within_reach(experts, slots_R)
        bound_L[rows] = bound.lower_bound(
            load.load_LE[rows, :experts], slots_R, speeds_R, limits.max_copies, limits.min_copies
        )
    return bound_L
