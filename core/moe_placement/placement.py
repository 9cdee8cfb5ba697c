"""Placement: which expert is in which slot, and which share of its tokens each copy serves.

The value that planners return, migration walks between and `score` judges. `moe_api.plan` is its
wire form. Neighbours: `capacity` (what may be where), `split` (finds the best fractions).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS, even_fractions
from moe_placement.capacity import Capacity

CopiesLE = npt.NDArray[np.int64]
HoldersLRE = npt.NDArray[np.bool_]
ExpertsL = npt.NDArray[np.int64]

FRACTION_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Placement:
    slots_LRS: SlotsLRS
    """int32, −1 = free."""
    fractions_LRS: FractionsLRS
    """float64, 0 in free slots; sums to 1 over an expert's copies."""

    @classmethod
    def even(cls, slots_LRS: SlotsLRS) -> Placement:
        """The same share for every copy of an expert."""
        return cls(slots_LRS, even_fractions(slots_LRS))


def copies(slots_LRS: SlotsLRS, num_experts: int) -> CopiesLE:
    """How many slots hold each expert, int64 [L, E]."""
    layers_N, ranks_N, slots_N = np.nonzero(slots_LRS >= 0)
    out = np.zeros((slots_LRS.shape[0], num_experts), dtype=np.int64)
    np.add.at(out, (layers_N, slots_LRS[layers_N, ranks_N, slots_N]), 1)
    return out


def holders(slots_LRS: SlotsLRS, num_experts: int) -> HoldersLRE:
    """Which rank holds which expert, bool [L, R, E]."""
    layers_N, ranks_N, slots_N = np.nonzero(slots_LRS >= 0)
    out = np.zeros((*slots_LRS.shape[:2], num_experts), dtype=np.bool_)
    out[layers_N, ranks_N, slots_LRS[layers_N, ranks_N, slots_N]] = True
    return out


def remaining(slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS) -> Placement:
    """What is left of a placement without some of its copies: the others serve all of their expert,
    in proportion, or evenly where their shares were zero."""
    index = np.nonzero(slots_LRS >= 0)
    key_N = index[0] * (int(slots_LRS.max(initial=0)) + 1) + slots_LRS[index]
    total_N = np.bincount(key_N, fractions_LRS[index])[key_N]
    even_N = even_fractions(slots_LRS)[index]
    lost_N = np.abs(total_N - 1) > FRACTION_TOLERANCE
    share_N = fractions_LRS[index] / np.where(lost_N & (total_N > 0), total_N, 1.0)
    out_LRS = np.zeros(slots_LRS.shape)
    out_LRS[index] = np.where(total_N > 0, share_N, even_N)
    return Placement(slots_LRS, out_LRS)


def received(old_LRS: SlotsLRS, new_LRS: SlotsLRS) -> int:
    """Expert weights that some rank must receive: those it is to hold and does not hold yet."""
    num_experts = int(max(old_LRS.max(), new_LRS.max())) + 1
    return int((holders(new_LRS, num_experts) & ~holders(old_LRS, num_experts)).sum())


def faults(
    placement: Placement, experts_L: ExpertsL, capacity: Capacity, *, spare: bool = False
) -> Iterator[str]:
    """What makes a placement invalid, in words; nothing when it is valid.

    Args:
        experts_L: number of experts of each layer.
        spare: every physical slot counts as room, as between two waves of a migration.
    """
    slots, fractions = placement.slots_LRS, placement.fractions_LRS
    if slots.shape != fractions.shape or slots.shape[:2] != (len(experts_L), capacity.num_ranks):
        yield f"shape {slots.shape}, fractions {fractions.shape}: expected {len(experts_L)} layers"
        return
    if (slots >= experts_L[:, None, None]).any() or (slots < -1).any():
        yield "a slot names an expert that does not exist"
        return
    num_experts = int(experts_L.max())
    count_LE = copies(slots, num_experts)
    exists_LE = np.arange(num_experts) < experts_L[:, None]
    for layer, expert in np.argwhere((count_LE == 0) & exists_LE)[:3].tolist():
        yield f"layer {layer}: expert {expert} has no copy"
    twice = (slots >= 0).sum(axis=2) - holders(slots, num_experts).sum(axis=2)
    for layer, rank in np.argwhere(twice > 0)[:3].tolist():
        yield f"layer {layer}: rank {rank} holds an expert twice"
    allowed_R = np.where(capacity.open_R, capacity.slots_R, 0)
    if spare:
        allowed_R = np.where(capacity.live_R, slots.shape[2], 0)
    filled_LR = (slots >= 0).sum(axis=2)
    for layer, rank in np.argwhere(filled_LR > allowed_R)[:3].tolist():
        yield (
            f"layer {layer}: rank {rank} holds {filled_LR[layer, rank]} experts, "
            f"it may hold {allowed_R[rank]}"
        )
    if not np.isfinite(fractions).all() or (fractions < 0).any():
        yield "a fraction is negative or not finite"
        return
    if (fractions[slots < 0] != 0).any():
        yield "a free slot has a fraction"
    sums_LE = np.zeros((len(experts_L), num_experts))
    layers_N, ranks_N, slots_N = np.nonzero(slots >= 0)
    index = (layers_N, ranks_N, slots_N)
    np.add.at(sums_LE, (layers_N, slots[index]), fractions[index])
    wrong_LE = (np.abs(sums_LE - 1) > FRACTION_TOLERANCE) & (count_LE > 0)
    for layer, expert in np.argwhere(wrong_LE)[:3].tolist():
        yield f"layer {layer}: fractions of expert {expert} sum to {sums_LE[layer, expert]:.6f}"
