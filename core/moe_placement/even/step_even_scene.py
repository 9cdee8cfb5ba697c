"""The scene of a search: some layers as they are now, and what one copy more or less would do.

With an even split a further copy of an expert relieves all its holders at once, and a copy that
retires burdens all that remain. Both are worked out here for all experts; `step_even_actions`
builds actions from them.

Shapes: L layers, E logical experts, F = E + 1 (the last stands for a free slot), R ranks, S
physical slots a rank, N anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.score import LoadLE

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(eq=False)
class Taboo:
    """What actions may not do for the time being."""

    no_more_LF: Flags
    """Experts that get no further copy."""
    not_from_LF: Flags
    """Experts whose copies stay where they are."""


@dataclass(eq=False)
class Scene:
    """Levels are load ÷ speed ÷ target: above 1 is too much."""

    slots_LRS: SlotsLRS
    counts_LF: Ints
    share_LF: Floats
    """Load of one copy ÷ target."""
    more_LF: Floats
    """The same if there were one copy more."""
    fewer_LF: Floats
    """The same if there were one copy less; of an expert's only copy as now."""
    pace_R: Floats
    """1 ÷ speed."""
    copy_LRS: Floats
    """What each slot adds to its rank's level."""
    level_LR: Floats
    open_LR: Flags
    """The rank may hold one expert more."""

    @classmethod
    def of(cls, load_LE: LoadLE, slots_LRS: SlotsLRS, slots_R: SlotsR, speeds_R: SpeedsR) -> Scene:
        """Args: load_LE: in units of each layer's target."""
        filled_LRS = slots_LRS >= 0
        counts_LF = sums(slots_LRS, filled_LRS.astype(np.float64), load_LE.shape[1])
        load_LF = np.pad(load_LE, ((0, 0), (0, 1)))
        share_LF = load_LF / np.maximum(counts_LF, 1)
        pace_R = 1.0 / speeds_R
        copy_LRS = each(share_LF, slots_LRS) * pace_R[:, None]
        return cls(
            slots_LRS=slots_LRS,
            counts_LF=counts_LF.astype(np.int64),
            share_LF=share_LF,
            more_LF=load_LF / (counts_LF + 1),
            fewer_LF=load_LF / np.maximum(counts_LF - 1, 1),
            pace_R=pace_R,
            copy_LRS=copy_LRS,
            level_LR=copy_LRS.sum(axis=2),
            open_LR=filled_LRS.sum(axis=2) < slots_R,
        )


@dataclass(eq=False)
class Effects:
    """Change of a layer's strain by what happens to one copy, without that on the copy's rank."""

    strain_LR: Floats
    further_LF: Floats
    """A further copy: relief of all present holders."""
    retire_LRS: Floats
    """The copy in this slot retires: burden on the other holders; 0 for a free slot that may be
    filled, inf for what may not happen."""

    @classmethod
    def of(cls, scene: Scene, below_L: Floats, limits: CopyLimits, taboo: Taboo) -> Effects:
        slots, level_LR1 = scene.slots_LRS, scene.level_LR[:, :, None]
        below_L11, pace_R1 = below_L[:, None, None], scene.pace_R[:, None]
        strain_LR = strain(scene.level_LR, below_L[:, None])
        relief_LRS = strain(
            level_LR1 - each(scene.share_LF - scene.more_LF, slots) * pace_R1, below_L11
        )
        relief_LRS -= strain_LR[:, :, None]
        burden_LRS = strain(
            level_LR1 + each(scene.fewer_LF - scene.share_LF, slots) * pace_R1, below_L11
        )
        burden_LRS -= strain_LR[:, :, None]
        num_experts = scene.share_LF.shape[1] - 1
        spare_LF = (scene.counts_LF > limits.min_copies) & ~taboo.not_from_LF
        others_LRS = each(sums(slots, burden_LRS, num_experts), slots) - burden_LRS
        retire_LRS = np.where(each(spare_LF, slots), others_LRS, np.inf)
        return cls(
            strain_LR=strain_LR,
            further_LF=sums(slots, relief_LRS, num_experts),
            retire_LRS=np.where(
                slots >= 0, retire_LRS, np.where(scene.open_LR[:, :, None], 0.0, np.inf)
            ),
        )


def strain(level: Floats, below: Floats) -> Floats:
    """Strain of a rank: max(0, level − 1)² + below · level²."""
    out = np.maximum(level - 1.0, 0.0)
    out *= out
    squared = level * level
    squared *= below
    out += squared
    return np.asarray(out)


def each(values_LF: npt.NDArray[_Scalar], slots_LRS: SlotsLRS) -> npt.NDArray[_Scalar]:
    """The value of the expert in each slot; the last for free slots."""
    flat_LN = slots_LRS.reshape(len(slots_LRS), -1)
    return np.take_along_axis(values_LF, flat_LN, 1).reshape(slots_LRS.shape)


def sums(slots_LRS: SlotsLRS, values_LRS: Floats, num_experts: int) -> Floats:
    """Sum of the values of each expert's copies, [L, F]; 0 for free slots."""
    shape = (len(slots_LRS), num_experts + 1)
    key_LRS = np.where(slots_LRS < 0, num_experts, slots_LRS)
    key_LRS = key_LRS + (np.arange(shape[0]) * shape[1])[:, None, None]
    sums_N = np.bincount(key_LRS.ravel(), values_LRS.ravel(), shape[0] * shape[1])
    sums_LF: Floats = sums_N.reshape(shape).astype(np.float64)
    sums_LF[:, -1] = 0.0
    return sums_LF
